-- The beginning of stand, for a lock that is free and for which nobody waits. This part runs before the functions of
-- the queue are defined, which saves time.

local function take()
  local stamp
  if ARGV[4] == '4' then -- the token of a lease that a majority has: it is kept as it is, however old
    local _, now = clock()
    stamp = after_all(tonumber(ARGV[8]), now)
  else
    stamp = next_token(clock())
  end
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return stamp
end

if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[6]) == 0 then
  return take()
end
