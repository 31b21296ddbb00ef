-- Keeps the token that a holder of the majority names (Redlock). KEYS: token. ARGV: token.
-- Returns {1, token}: kept; {0, present}: that is not less.
-- Invariant: as token.lua: what is kept only grows, and outlives the instant that it names by ten minutes.

local present, named = tonumber(redis.call('GET', KEYS[1]) or 0), tonumber(ARGV[1])
if present >= named then
  return {0, present}
end
local time = redis.call('TIME')
local ahead = math.ceil(named / 1000) - (time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', KEYS[1], ARGV[1], 'PX', math.max(ahead, 0) + 600000)
return {1, named}
