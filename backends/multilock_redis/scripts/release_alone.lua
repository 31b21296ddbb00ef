-- The beginning of release, before what a queue needs is even defined: who holds it alone, and nobody waits for it.

local text = redis.call('GET', KEYS[1])
local queue = redis.call('EXISTS', KEYS[2]) == 1
if text == ARGV[1] and not queue and ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return 1
end
