-- Common head of what can issue a token. KEYS 3: live, 4: token.
-- Invariant: a token is greater than every token of this name before it.

-- The server's clock: microseconds, milliseconds. Numbers go to commands with all 16 digits as they are (%.17g).
local function clock()
  local time = redis.call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  return now_us, math.floor(now_us / 1000)
end

-- Raises on a replica, which may lag behind, or be empty: no server says no that could not write. It changes nothing.
-- What else refuses a write (a full disk) says nothing of that.
local function primary_only()
  local wrote = redis.pcall('HDEL', KEYS[3], '')
  if type(wrote) == 'table' and string.find(wrote.err, 'READONLY', 1, true) then
    redis.call('HDEL', KEYS[3], '')
  end
end

-- Greater than every token before it. The key outlives the instant that the token itself names by ten minutes, so a
-- token ahead of the clock (which was stepped back) is remembered until the clock has passed it; and, where that is
-- later, the end of a lease of `ttl` by as much.
local function next_token(now_us, now, ttl)
  local last = redis.call('GET', KEYS[4])
  local token = now_us
  if last and last + 1 > token then
    token = last + 1
  end
  redis.call('SET', KEYS[4], token, 'PX', math.ceil(token / 1000) - now + 600000 + (ttl or 0))
  return token
end
