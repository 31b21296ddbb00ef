-- Common head of all scripts that can issue a token. KEYS 3: live, 4: token.
-- Invariant: a token is greater than every earlier token of this name.

-- The server's clock: microseconds, milliseconds. Numbers are passed to commands with all 16 digits (%.17g).
local function clock()
  local time = redis.call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  return now_us, math.floor(now_us / 1000)
end

-- Raises an error on a replica, and changes nothing. A replica may lag behind, so a server that cannot write must not
-- refuse a claim. Other reasons to refuse a write, such as a full disk, do not matter here.
local function primary_only()
  local wrote = redis.pcall('HDEL', KEYS[3], '')
  if type(wrote) == 'table' and string.find(wrote.err, 'READONLY', 1, true) then
    redis.call('HDEL', KEYS[3], '')
  end
end

-- Issues a token greater than every earlier one. The key is kept until ten minutes and `ttl` after the time of the
-- token. So a token ahead of the clock (which was stepped back) is remembered until the clock has passed it.
local function next_token(now_us, now, ttl)
  local last = redis.call('GET', KEYS[4])
  local token = now_us
  if last and last + 1 > token then
    token = last + 1
  end
  redis.call('SET', KEYS[4], token, 'PX', math.ceil(token / 1000) - now + TOKEN_KEPT + (ttl or 0))
  return token
end
