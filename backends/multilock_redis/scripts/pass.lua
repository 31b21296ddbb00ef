-- Common head of acquire, release and force. KEYS: 1 lock, 2 queue, 3 live, 4 token. Times are server milliseconds.
-- Invariant: a waiter that is alive and listens is never overtaken; a waiter that is dead costs nobody more than the
-- rest of its own deadline.

-- The server's clock: microseconds, milliseconds. Numbers go to commands with all 16 digits as they are (%.17g).
local function clock()
  local time = redis.call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  return now_us, math.floor(now_us / 1000)
end

-- Greater than every token before it. The key outlives the instant that the token itself names by ten minutes, so a
-- token ahead of the clock (which was stepped back) is remembered until the clock has passed it.
local function next_token()
  local now_us, now = clock()
  local last = redis.call('GET', KEYS[4])
  local token = now_us
  if last and last + 1 > token then
    token = last + 1
  end
  redis.call('SET', KEYS[4], token, 'PX', math.ceil(token / 1000) - now + 600000)
  return token
end

local function leave(owner)
  redis.call('ZREM', KEYS[2], owner)
  redis.call('HDEL', KEYS[3], owner)
end

-- Tells the client of this owner to look again; 0 means that it certainly does not listen. Not being allowed to
-- publish (an error, not 0) must not abort a half-done script: its timer wakes the waiter.
local function wake(owner)
  local id, client = string.match(owner, '^((%x+)%.%x+)@')
  return id and redis.pcall('PUBLISH', 'multilock:wake:' .. client, id)
end

-- Gives the free lock to the first waiter that is alive and listens, and returns it; or returns `me` where that comes
-- first; or nil where there is none. Who does not listen keeps its place: it may only be reconnecting.
local function pass(me)
  local _, now = clock()
  local skipped = 0
  while skipped < 16 do
    local head = redis.call('ZRANGE', KEYS[2], skipped, skipped)[1]
    if not head or head == me then
      return head
    end
    local live = redis.call('HGET', KEYS[3], head)
    local left = live and string.sub(live, 2) - now or 0
    if left <= 0 then
      leave(head)
    elseif wake(head) == 0 then
      skipped = skipped + 1
    else
      next_token()
      redis.call('SET', KEYS[1], head, 'PX', left)
      leave(head)
      return head
    end
  end
end
