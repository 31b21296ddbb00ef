-- Takes the lock, or takes and keeps a place in its queue. KEYS 5: tombstone of this id.
-- ARGV: owner, ttl ms, liveness as a waiter in ms (0: do not join), 1: may take a free lock past the queue.
-- Returns the token: held for ttl from now. {pttl, rank}: not held (pttl -1: another's lock without an end; rank -1:
-- not queued). {-2, -1}: this id was cancelled.
-- Invariant: the same request may arrive any number of times, early, late, or after its cancel, and changes nothing
-- that its answer would not say; so first call, heartbeat, confirmation and re-send are one rule.

local owner, ttl, wait, barge = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'

local function take()
  local token = next_token(clock())
  redis.call('SET', KEYS[1], owner, 'PX', ttl)
  return token
end

if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[5]) == 0 then
  return take()
end
local holder = redis.call('GET', KEYS[1])
if holder == owner then
  redis.call('PEXPIRE', KEYS[1], ttl)
  local token = redis.call('GET', KEYS[4])
  return token and tonumber(token) or next_token(clock())
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  return {-2, -1}
end

if wait > 0 then
  local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
  local ticket, now = clock()
  if last and last + 1 > ticket then
    ticket = last + 1
  end
  -- The first write decides: a full memory or a missing right refuses that one, and nothing is left. What is refused
  -- after it must leave no key without an end.
  redis.call('HSET', KEYS[3], owner, string.format('f%.0f', now + wait))
  local ends = redis.pcall('PEXPIRE', KEYS[3], 60000)
  if type(ends) == 'table' then
    redis.call('HDEL', KEYS[3], owner)
    return ends
  end
  redis.call('ZADD', KEYS[2], 'NX', ticket, owner)
  redis.call('PEXPIRE', KEYS[2], 60000)
end
if not holder and (barge or pass(owner)) then
  leave(owner)
  return take()
end
return {redis.call('PTTL', KEYS[1]), redis.call('ZRANK', KEYS[2], owner) or -1}
