-- Takes the lock together with others of the same mode, or takes and keeps a place in its queue. KEYS 6: tombstone of
-- this id.
-- ARGV: owner, ttl ms, liveness as a waiter in ms (0: do not join; below 0: its client cannot be notified), mode: `r`,
-- or `p<n>` for one of n permits, echo (empty: a push is only a hint).
-- Returns {1, token, generation}: held for ttl from now. {pttl, rank} and {-2, -1}: as acquire. {-3, n}: the name has n
-- permits at present, but this claim asked for a different number of permits; nothing of this id is left.
-- Invariant: as acquire. Each reply has its own token, so a lost reply costs nothing but a number.

local owner, ttl, wait, mode = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

local function held(text, token)
  local now_us, now = clock()
  return {1, token or next_token(now_us, now, ttl), tonumber(string.match(text, '%d+$'))}
end

local text = present(redis.call('GET', KEYS[1]))
local present_mode = shared_as(text)
if present_mode and redis.call('ZSCORE', KEYS[5], owner) then
  share(owner, mode, text, ttl)
  if redis.call('EXISTS', KEYS[2]) == 1 then
    -- One script gives the lock to a limited number of waiters; their confirmations give it to the next.
    pass(owner, text)
  end
  return held(text)
end
local queued = redis.call('EXISTS', KEYS[2], KEYS[6]) > 0
if queued and redis.call('EXISTS', KEYS[6]) == 1 then
  return {-2, -1}
end
local permits = other_number(mode, text)
if permits then
  if queued and leave(owner) then
    pass(nil, text)
  end
  primary_only()
  return {-3, tonumber(permits)}
end

local first = true
if wait ~= 0 and (queued or not fits(mode, text)) then
  join(owner, mode, wait, ARGV[5])
  queued = true
end
if queued then
  text, first = pass(owner, text)
end
if first and fits(mode, text) then
  if queued then
    leave(owner)
  end
  return held(share(owner, mode, text, ttl))
end
primary_only()
return busy(owner, mode, text)
