-- The beginning of release, for an exclusive lock for which nobody waits. This part runs before the functions of the
-- queue are defined, which saves time.

local text = redis.call('GET', KEYS[1])
local queue = redis.call('EXISTS', KEYS[2]) == 1
if text == ARGV[1] and not queue and ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return 1
end
