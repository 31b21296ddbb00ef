-- The beginning of acquire, for a lock that is free and for which nobody waits. This part runs before the functions of
-- the queue are defined, which saves time.

local function take()
  local now_us, now = clock()
  local token = next_token(now_us, now, ARGV[2])
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return token
end

if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[6]) == 0 then
  return take()
end
