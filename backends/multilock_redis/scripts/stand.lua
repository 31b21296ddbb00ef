-- As acquire.lua, for a client that asks several servers for one exclusive lock (Redlock). KEYS 6: tombstone of this
-- id. ARGV: owner, ttl ms, liveness as a waiter in ms (0: do not join; below 0: its client cannot be notified), mode,
-- echo (empty: a push is only a hint), ticket, age µs, proposed stamp. The modes: 0: ask; 1: ask, past the queue; 2:
-- give way to claims that came earlier, even if this claim has the lock; 3: as 0, and if this claim has the lock, raise
-- its stamp to the proposed one; 4: as 3, and the proposed stamp is the token of this holder. Returns the stamp: held
-- for ttl from now. {pttl, rank, newest stamp}: not held (pttl -1: the holder's lock has no end; rank -1: not queued).
-- {-2, -1, 0}: this id was cancelled. Invariant: as acquire.lua. A claim that has the lock and asks again keeps its
-- stamp, unless it asks to raise it.

local owner, ttl, wait, mode = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

-- The claim's place is the time of its call by its client's clock. If that clock is wrong, the place is the present
-- time minus the claim's age. So all servers give it nearly the same place.
local function stand()
  local now_us = clock()
  local ticket, age = tonumber(ARGV[6]), tonumber(ARGV[7])
  join(owner, 'x', wait, ARGV[5], string.format('%.0f', near(ticket + age, now_us) - age))
end

local function refused(text)
  local answer = busy(owner, 'x', text)
  answer[3] = tonumber(redis.call('GET', KEYS[4]) or 0)
  return answer
end

local text = redis.call('GET', KEYS[1])
if text == owner then
  if mode == '2' then
    stand()
    local given = pass(owner)
    if given then
      return refused(given)
    end
    leave(owner)
  end
  redis.call('PEXPIRE', KEYS[1], ttl)
  local last, proposed = tonumber(redis.call('GET', KEYS[4]) or 0), tonumber(ARGV[8])
  if last == 0 then -- the stamp was forgotten while the lock still existed
    return next_token(clock())
  elseif (mode == '3' or mode == '4') and proposed > last then
    local _, now = clock()
    return keep(proposed, now)
  end
  return last
end
if redis.call('EXISTS', KEYS[6]) == 1 then
  return {-2, -1, 0}
end

if wait ~= 0 then
  stand()
end
if not text or shared_as(text) then
  local first = mode == '1'
  text = present(text)
  if not first then
    text, first = pass(owner, text)
  end
  if first and not text then
    leave(owner)
    return take()
  end
end
return refused(text)
