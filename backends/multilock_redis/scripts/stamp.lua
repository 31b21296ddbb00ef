-- Common head of the scripts that can admit a claim to a lock on several servers (Redlock). KEYS 4: token. The last of
-- ARGV: the stamp that the client proposes, in µs: the time of its wall clock, or later. Invariant: whenever a claim is
-- admitted, its stamp is greater than every earlier stamp of this name on this server.

local NEAR = 1000 * CLOCKS_WITHIN -- µs

-- The server's clock: microseconds, milliseconds. Numbers are passed to commands with all 16 digits (%.17g).
local function clock()
  local time = redis.call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  return now_us, math.floor(now_us / 1000)
end

local function near(number, now_us)
  return math.min(math.max(number, now_us - NEAR), now_us + NEAR)
end

-- The key is kept until ten minutes after the time of the stamp. So a stamp ahead of the clock is remembered until the
-- clock has passed it.
local function keep(stamp, now)
  redis.call('SET', KEYS[4], stamp, 'PX', math.max(math.ceil(stamp / 1000) - now, 0) + TOKEN_KEPT)
  return stamp
end

-- A new stamp: the proposed one, or one more than the stored stamp if that is greater.
local function after_all(proposed, now)
  local last = redis.call('GET', KEYS[4])
  if last and last + 1 > proposed then
    proposed = last + 1
  end
  return keep(proposed, now)
end

local function next_token(now_us, now)
  return after_all(near(tonumber(ARGV[#ARGV]), now_us), now)
end
