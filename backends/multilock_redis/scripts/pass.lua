-- Common head of acquire, release and force. KEYS: 1 lock, 2 queue, 3 live, 4 token. Times are server milliseconds.
-- Invariant: a waiter that is alive and listens is never overtaken; a waiter that is dead costs nobody more than the
-- rest of its own deadline.

local LOOKED_AT = 100 -- waiters that do not listen, in one script: they keep the server for about a millisecond
-- Milliseconds that one request can keep a place for (`liveness` in recipe.py). A deadline that is further away was
-- written before the clock was stepped back; it would keep a dead waiter's place, or give it the lock, for that long.
local LONGEST = 6000

-- The server's clock: microseconds, milliseconds. Numbers go to commands with all 16 digits as they are (%.17g).
local function clock()
  local time = redis.call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  return now_us, math.floor(now_us / 1000)
end

-- Greater than every token before it. The key outlives the instant that the token itself names by ten minutes, so a
-- token ahead of the clock (which was stepped back) is remembered until the clock has passed it.
local function next_token(now_us, now)
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

-- The id in an owner's text, and the channel on which its client listens; nil for what is none of ours.
local function channel_of(owner)
  local id, client = string.match(owner, '^((%x+)%.%x+)@')
  return id, client and 'multilock:wake:' .. client
end

-- Tells the client of this owner to look again. Not being allowed to publish must not abort a half-done script: its
-- timer wakes the waiter.
local function wake(owner)
  local id, channel = channel_of(owner)
  if id then
    redis.pcall('PUBLISH', channel, id)
  end
end

-- False only if nobody certainly listens for this owner: its process is dead, or connects again. Not what PUBLISH
-- answers, which counts every monitor that is subscribed to a pattern. Not being allowed to ask is no answer.
local function listens(owner)
  local _, channel = channel_of(owner)
  return not channel or redis.pcall('PUBSUB', 'NUMSUB', channel)[2] ~= 0
end

-- Gives the free lock to the first waiter that is alive and listens. Returns whether `me` may take it instead: it comes
-- before such a waiter, or there is none. Who does not listen keeps its place. Where not all who do not could be looked
-- at, it is not known who is first: nobody may take it then, and it stays free until a deadline of theirs is over.
-- PUBLISH is the last that is done: no error follows it, and nothing that it tells of is taken back.
local function pass(me)
  local now_us, now = clock()
  local skipped = 0
  while skipped < LOOKED_AT do
    local head = redis.call('ZRANGE', KEYS[2], skipped, skipped)[1]
    if not head or head == me then
      return true
    end
    local live = redis.call('HGET', KEYS[3], head)
    local left = live and string.sub(live, 2) - now or 0
    if left > LONGEST then
      left = LONGEST
      redis.call('HSET', KEYS[3], head, string.format('f%.0f', now + left))
    end
    if left <= 0 then
      leave(head)
    elseif not listens(head) then
      skipped = skipped + 1
    else
      next_token(now_us, now)
      redis.call('SET', KEYS[1], head, 'PX', left)
      leave(head)
      wake(head)
      return false
    end
  end
  return false
end
