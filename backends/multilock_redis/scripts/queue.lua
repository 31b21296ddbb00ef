-- Common head of acquire, share, release, rest and force, after token.lua. KEYS: 1 lock, 2 queue, 3 live, 4 token,
-- 5 holders. Times are server milliseconds.
--
-- The lock contains the owner that holds it exclusively, or a marker, `#multilock:<mode>:<generation>`, while it is
-- shared in a mode: `r` (readers) or `p<n>` (n permits). The holders of a shared lock are in `holders`, each with the
-- end of its own lease. `holders` counts under a marker only, and is deleted before a marker is made: if an operator
-- has deleted the marker, the former holders must not get the name back.
--
-- The push of a hand-over is a grant. How long it is valid depends on when the waiter's request was sent. So the
-- request contains this time (`echo`), which is stored beside the deadline that the same request set, and returned with
-- the push. The scripts never interpret it.
--
-- Invariant: all holders fit together. A waiter that is alive and listens is never overtaken. A dead waiter delays
-- others only until its own deadline.

local LOOKED_AT = 100  -- waiters that do not listen, for one script: so many occupy the server for about a millisecond
-- Waiters that get a shared lock in one script. Their confirmations give the lock to the next waiters.
local GIVEN = 64

-- Takes a place at the end of the queue, or keeps the present one, for `wait` ms. If `wait` is below 0, the client's
-- subscription was refused (`q`), so it does not matter that it does not listen. `echo` is empty if a push is only a
-- hint. `ticket` is the same place on several servers, in µs of the client's clock; nil: at the end.
local function join(owner, mode, wait, echo, ticket)
  -- A claim keeps its place even if the memory is full: after this write, no other write is refused for that reason.
  if redis.call('ZSCORE', KEYS[2], owner) then
    redis.call('PEXPIRE', KEYS[2], QUEUE_KEPT)
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
  -- The first write decides: if the memory is full or a right is missing, it is refused, and nothing is left behind. A
  -- later refusal must not leave a key without an expiry. One write sets deadline and echo, because an echo with the
  -- deadline of another request could make the grant too long.
  local deadline = string.format('%s:%.0f%s', mode, now + math.abs(wait), wait < 0 and 'q' or '')
  if echo ~= '' then
    deadline = deadline .. ':' .. echo
  end
  redis.call('HSET', KEYS[3], owner, deadline)
  local ends = redis.pcall('PEXPIRE', KEYS[3], QUEUE_KEPT)
  if type(ends) == 'table' then
    redis.call('HDEL', KEYS[3], owner)
    redis.call('PEXPIRE', KEYS[3], QUEUE_KEPT)  -- is refused again, and raises the error
  end
  redis.call('ZADD', KEYS[2], 'NX', ticket, owner)
  redis.call('PEXPIRE', KEYS[2], QUEUE_KEPT)
end

local function leave(owner)
  redis.call('HDEL', KEYS[3], owner)
  return redis.call('ZREM', KEYS[2], owner) == 1
end

-- The id in an owner's text, and the channel to which its client subscribes; nil for an owner that is not ours.
local function channel_of(owner)
  local id, client = string.match(owner, '^((%x+)%.%x+)@')
  return id, client and 'multilock:wake:' .. client
end

-- Notifies the client of this owner to ask again. With a token the push is a grant, and `text` is the lock's text. If
-- the server refuses to publish, the script must continue: the waiter's timer wakes it.
local function wake(owner, echo, token, text)
  local id, channel = channel_of(owner)
  if id then
    redis.pcall('PUBLISH', channel, token and string.format('%s %s %.0f %s', id, echo, token, text) or id)
  end
end

-- False only if certainly no client listens for this owner: its process is dead, or is just reconnecting. The result of
-- PUBLISH does not show this, since it also counts subscriptions to patterns. If the server refuses, this is true.
local function listens(owner)
  local _, channel = channel_of(owner)
  return not channel or redis.pcall('PUBSUB', 'NUMSUB', channel)[2] ~= 0
end

-- The mode in which a lock with this text is shared; nil: it is free, rests, or is held exclusively.
local function shared_as(text)
  return text and string.match(text, '^#multilock:([rp]%d*):%d+$')
end

-- Removes holders whose leases have ended. A full memory refuses neither this nor a write after it.
local function forget_ended()
  local _, now = clock()
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now)
end

-- The text of a shared lock, or nil if it has no holder left.
local function if_anybody(text)
  if redis.call('EXISTS', KEYS[5]) == 1 then
    return text
  end
  redis.call('DEL', KEYS[1])
  return nil
end

-- The present text of the lock, or nil if it is free.
local function present(text)
  if shared_as(text) then
    forget_ended()
    return if_anybody(text)
  end
  return text or nil
end

-- Whether one more claim of this mode (`x`: exclusive) may hold a lock with this text.
local function fits(mode, text)
  if not text then
    return true
  end
  local permits = tonumber(string.sub(mode, 2))
  return mode == shared_as(text) and (not permits or redis.call('ZCARD', KEYS[5]) < permits)
end

-- The number of permits that the lock has, if this mode asks for a different number of permits.
local function other_number(mode, text)
  local shared = shared_as(text)
  return shared and shared ~= mode and string.match(shared .. mode, '^p(%d+)p')
end

-- Makes the marker and the holders live for at least `ttl`. It extends them to 1.5 `ttl`, and thus rarely, because each
-- change of the lock is pushed to all its holders.
local function put_off(ttl)
  if redis.call('PTTL', KEYS[1]) < ttl then
    redis.call('PEXPIRE', KEYS[1], math.ceil(ttl * 1.5))
    redis.call('PEXPIRE', KEYS[5], math.ceil(ttl * 1.5))
  end
end

-- Makes this owner a holder of the shared lock, for ttl from now. Returns the new text of the lock and, with a new
-- marker, the token that was issued.
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
  redis.call('PEXPIRE', KEYS[5], ttl)  -- fails here if a right is missing, before there is a key without an expiry
  redis.call('ZADD', KEYS[5], now + ttl, owner)
  redis.call('PEXPIRE', KEYS[5], math.ceil(ttl * 1.5))
  return text, token
end

-- Gives the lock to the first waiters that are alive and listen, in order, as many as fit its text. Returns the new
-- text, and whether `me` is next: no other such waiter comes before it. A waiter that does not listen keeps its place.
-- If there are too many of these for one script, it is unknown which waiter is next. Then none is, until one of their
-- deadlines is over. A push is never taken back. So it is sent last, when everything is written. It is never sent to a
-- waiter that is skipped, because such a waiter may receive it through a replica. If many waiters get a shared lock,
-- the last of them gets only a hint. Its next request gives the lock to the next waiters.
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
    -- No request keeps a place for longer, so a later deadline was written before the clock was stepped back. It would
    -- keep a dead waiter's place, or lease, for too long.
    if left > LIVENESS_MAX then
      left = LIVENESS_MAX
      redis.call('HSET', KEYS[3], head, string.format('%s:%.0f%s%s', mode, now + left, quiet, echo))
    end
    if left <= 0 then
      leave(head)
    elseif quiet == '' and not listens(head) then
      skipped = skipped + 1
    elseif not fits(mode, text) then
      if other_number(mode, text) then
        wake(head)  -- so that it asks and is refused, because it blocks all waiters behind it
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

-- The reply to a claim that must wait: in how many ms the lock can end by itself (-1: never), and the claim's rank (-1:
-- not queued). If the claim waits for one of equally many permits, the lease that ends first counts, otherwise the
-- lease that ends last.
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
