-- Takes the lock exclusively, or takes and keeps a place in its queue. If the lock is free and nobody waits,
-- acquire_free.lua has already taken it. KEYS 6: tombstone of this id. ARGV: owner, ttl ms, liveness as a waiter in ms
-- (0: do not join; below 0: its client cannot be notified), 1: may take a free lock past the queue, echo (empty: a push
-- is only a hint). Returns the token: held for ttl from now. {pttl, rank}: not held (pttl -1: the holder's lock has no
-- end; rank -1: not queued). {-2, -1}: this id was cancelled. Invariant: the same request may arrive any number of
-- times, early, late, or after its cancel, and changes only what its reply reports.

local owner, ttl, wait, barge = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'

local text = redis.call('GET', KEYS[1])
if text == owner then
  redis.call('PEXPIRE', KEYS[1], ttl)
  local token = redis.call('GET', KEYS[4])
  if not token then
    local now_us, now = clock()
    return next_token(now_us, now, ttl)
  end
  if redis.call('PTTL', KEYS[4]) < ttl + TOKEN_KEPT / 2 then
    redis.call('PEXPIRE', KEYS[4], ttl + TOKEN_KEPT)
  end
  return tonumber(token)
end
if redis.call('EXISTS', KEYS[6]) == 1 then
  return {-2, -1}
end

if wait ~= 0 then
  join(owner, 'x', wait, ARGV[5])
end
if not text or shared_as(text) then
  local first = barge
  text = present(text)
  if not barge then
    text, first = pass(owner, text)
  end
  if first and not text then
    leave(owner)
    return take()
  end
end
primary_only()
return busy(owner, 'x', text)
