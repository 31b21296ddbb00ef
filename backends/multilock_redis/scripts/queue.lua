-- Common head of acquire, share, release, rest and force, after token.lua. KEYS: 1 lock, 2 queue, 3 live, 4 token,
-- 5 holders. Times are server milliseconds.
--
-- The lock is the owner that holds it alone, or a marker, `#multilock:<mode>:<generation>`, while it is shared in a mode:
-- `r` (readers) or `p<n>` (n permits). Those who share it stand in `holders`, each with the end of its own lease. What
-- stands there counts under a marker only, and who makes a marker deletes it first: else one who had the name before an
-- operator deleted the marker would have it again.
--
-- The push of a hand-over is a grant for as long as the waiter's own request vouches for: it sends its time of sending
-- (`echo`), which stands beside the deadline that this very request set, and goes back with the push. The server never
-- reads it.
--
-- Invariant: who hold it fit together; a waiter that is alive and listens is never overtaken, whatever it wants; a waiter
-- that is dead costs nobody more than the rest of its own deadline.

local LOOKED_AT = 100 -- waiters that do not listen, in one script: they keep the server for about a millisecond
local GIVEN = 64 -- who share it and are given it in one script: so do these; their confirmations go on with the next
-- Milliseconds that one request can keep a place for (`liveness` in recipe.py). A deadline that is further away was
-- written before the clock was stepped back; it would keep a dead waiter's place, or give it the lock, for that long.
local LONGEST = 6000

-- Takes a place at the end of the queue, or keeps the one it has. `wait` is for how long; below 0: its client is refused
-- a subscription (`q`), and that it does not listen says nothing. `echo` is empty where a push is a hint only. `ticket`
-- is the place that its client asks for on several servers alike, in µs of its own clock; nil: at the end.
local function join(owner, mode, wait, echo, ticket)
  -- Who has its place keeps it though the memory is full: after this write nothing is refused for that.
  if redis.call('ZSCORE', KEYS[2], owner) then
    redis.call('PEXPIRE', KEYS[2], 60000)
  end
  local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
  local now_us, now = clock()
  if ticket then
    ticket = tonumber(ticket)
  elseif last and last + 1 > now_us then
    ticket = last + 1
  else
    ticket = now_us
  end
  -- The first write decides: a full memory or a missing right refuses that one, and nothing is left. What is refused
  -- after it must leave no key without an end.
  -- And one write sets both: an echo beside the deadline of another request would vouch for too much.
  local deadline = string.format('%s:%.0f%s', mode, now + math.abs(wait), wait < 0 and 'q' or '')
  if echo ~= '' then
    deadline = deadline .. ':' .. echo
  end
  redis.call('HSET', KEYS[3], owner, deadline)
  local ends = redis.pcall('PEXPIRE', KEYS[3], 60000)
  if type(ends) == 'table' then
    redis.call('HDEL', KEYS[3], owner)
    redis.call('PEXPIRE', KEYS[3], 60000) -- refused again, and raised
  end
  redis.call('ZADD', KEYS[2], 'NX', ticket, owner)
  redis.call('PEXPIRE', KEYS[2], 60000)
end

local function leave(owner)
  redis.call('HDEL', KEYS[3], owner)
  return redis.call('ZREM', KEYS[2], owner) == 1
end

-- The id in an owner's text, and the channel on which its client listens; nil for what is none of ours.
local function channel_of(owner)
  local id, client = string.match(owner, '^((%x+)%.%x+)@')
  return id, client and 'multilock:wake:' .. client
end

-- Tells the client of this owner to look again or, with a token, that it has it: `text` then stands in the lock. Not
-- being allowed to publish must not abort a half-done script: its timer wakes the waiter.
local function wake(owner, echo, token, text)
  local id, channel = channel_of(owner)
  if id then
    redis.pcall('PUBLISH', channel, token and string.format('%s %s %.0f %s', id, echo, token, text) or id)
  end
end

-- False only if nobody certainly listens for this owner: its process is dead, or connects again. Not what PUBLISH
-- answers, which counts every monitor that is subscribed to a pattern. Not being allowed to ask is no answer.
local function listens(owner)
  local _, channel = channel_of(owner)
  return not channel or redis.pcall('PUBSUB', 'NUMSUB', channel)[2] ~= 0
end

-- The mode in which a lock of this text is shared; nil: it is free, rests, or is held alone.
local function shared_as(text)
  return text and string.match(text, '^#multilock:([rp]%d*):%d+$')
end

-- Takes those out whose lease has ended. A full memory never refuses it, nor what is written after it.
local function forget_ended()
  local _, now = clock()
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now)
end

-- The text of a shared lock, or nil: nobody is left who shares it.
local function if_anybody(text)
  if redis.call('EXISTS', KEYS[5]) == 1 then
    return text
  end
  redis.call('DEL', KEYS[1])
  return nil
end

-- What stands in the lock, as it is now: nil if it is free.
local function present(text)
  if shared_as(text) then
    forget_ended()
    return if_anybody(text)
  end
  return text or nil
end

-- Whether one more of this mode (`x`: alone) may hold what stands in the lock.
local function fits(mode, text)
  if not text then
    return true
  end
  local permits = tonumber(string.sub(mode, 2))
  return mode == shared_as(text) and (not permits or redis.call('ZCARD', KEYS[5]) < permits)
end

-- The number of permits that stands in the lock, if this mode asks for another one.
local function other_number(mode, text)
  local shared = shared_as(text)
  return shared and shared ~= mode and string.match(shared .. mode, '^p(%d+)p')
end

-- No earlier than in `ttl` the marker and what it makes count end. Half as late again when it has to be put off: else each
-- acquire and each renewal would change the lock, which is pushed to all who share it.
local function put_off(ttl)
  if redis.call('PTTL', KEYS[1]) < ttl then
    redis.call('PEXPIRE', KEYS[1], math.ceil(ttl * 1.5))
    redis.call('PEXPIRE', KEYS[5], math.ceil(ttl * 1.5))
  end
end

-- Makes it one of those who share the lock, for ttl from now. Returns what then stands in it and, with a new marker, the
-- token that was issued.
local function share(owner, mode, text, ttl)
  local now_us, now = clock()
  if text then
    redis.call('ZADD', KEYS[5], now + ttl, owner)
    put_off(ttl)
    return text
  end
  local token = next_token(now_us, now, ttl)
  text = string.format('#multilock:%s:%.0f', mode, token)
  redis.call('SET', KEYS[1], text, 'PX', math.ceil(ttl * 1.5))
  redis.call('DEL', KEYS[5])
  redis.call('PEXPIRE', KEYS[5], ttl) -- a missing right shows here, before there is a key that would not end
  redis.call('ZADD', KEYS[5], now + ttl, owner)
  redis.call('PEXPIRE', KEYS[5], math.ceil(ttl * 1.5))
  return text, token
end

-- Gives the lock to the first waiters that are alive and listen, in their order, as many as fit what stands in it (`text`).
-- Returns what stands in it then, and whether `me` comes next: before every other such waiter, or there is none. Who does
-- not listen keeps its place. Where not all who do not could be looked at, it is not known who is next: nobody is, until
-- a deadline of theirs is over. What a push tells of is never taken back: so it is sent last, when all of it is written,
-- and never to one that is skipped, who may hear it all the same (a replica passes on what nobody here listens to).
-- Of many to share it the last one has to ask: with its confirmation it goes on with the next.
local function pass(me, text)
  local now_us, now = clock()
  local skipped, given = 0, 0
  while skipped < LOOKED_AT and given < GIVEN do
    local head = redis.call('ZRANGE', KEYS[2], skipped, skipped)[1]
    if not head or head == me then
      return text, true
    end
    local live = redis.call('HGET', KEYS[3], head)
    local mode, till, quiet, echo = string.match(live or '', '^(%l%d*):(%d+)(q?)(.*)$')
    local left = till and till - now or 0
    if left > LONGEST then
      left = LONGEST
      redis.call('HSET', KEYS[3], head, string.format('%s:%.0f%s%s', mode, now + left, quiet, echo))
    end
    if left <= 0 then
      leave(head)
    elseif quiet == '' and not listens(head) then
      skipped = skipped + 1
    elseif not fits(mode, text) then
      if other_number(mode, text) then
        wake(head) -- to be refused now: it keeps out all behind it until then
      end
      return text, false
    else
      given = given + 1
      local told = echo ~= '' and (mode == 'x' or given < GIVEN)
      local token
      if mode == 'x' or text and told then
        token = next_token(now_us, now)
      end
      if mode == 'x' then
        redis.call('SET', KEYS[1], head, 'PX', left)
        text = head
      else
        local made
        text, made = share(head, mode, text, left)
        token = token or made
      end
      leave(head)
      wake(head, string.sub(echo, 2), told and token, text)
      if mode == 'x' then
        return text, false
      end
    end
  end
  return text, false
end

-- What the queue says to one who has to wait: in how many ms what stands in the lock can end by itself (-1: never), and
-- its rank (-1: not queued). Of as many permits as it asks for the first one to end lets it in, of others the last one.
local function busy(owner, mode, text)
  local left
  local shared = shared_as(text)
  if shared then
    local which = mode ~= 'r' and mode == shared and 0 or -1
    local _, now = clock()
    left = math.max(0, redis.call('ZRANGE', KEYS[5], which, which, 'WITHSCORES')[2] - now)
  else
    left = redis.call('PTTL', KEYS[1])
  end
  return {left, redis.call('ZRANK', KEYS[2], owner) or -1}
end
