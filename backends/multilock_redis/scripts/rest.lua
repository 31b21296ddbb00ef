-- Lets the name, or the owner's permit, rest: nobody holds it, but it stays taken until a time of the server's clock.
-- KEYS 6: tombstone of this id. ARGV: owner, lifetime of the tombstone in ms (0: every request of this id was
-- answered), length of the rest in ms, prefix of a resting owner. Returns 1: it was this owner's until now; 0: it was
-- not, and this was a release. Invariant: no request names a resting owner, so nobody renews, takes or releases its
-- lock. If this request is sent again or executed late, it can only end the rest earlier. A waiter keeps its place, and
-- gets the name when the rest is over, as when a holder's lease ends.

local owner, tomb, left, resting = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] .. ARGV[1]

local text = redis.call('GET', KEYS[1])
local held, again = text == owner, text == resting
if held then
  -- A full memory does not refuse this first write, and then refuses no later write.
  redis.call('PEXPIRE', KEYS[1], left)
  redis.call('SET', KEYS[1], resting, 'PX', left)
elseif again then
  if left < redis.call('PTTL', KEYS[1]) then
    redis.call('PEXPIRE', KEYS[1], left)
  end
elseif shared_as(text) then
  forget_ended()
  local _, now = clock()
  local ends = redis.call('ZSCORE', KEYS[5], resting)
  -- Add the resting owner before the old one leaves: with its last member, the set would lose its expiry.
  held, again = redis.call('ZSCORE', KEYS[5], owner), ends
  if held or again and now + left < tonumber(ends) then
    redis.call('ZADD', KEYS[5], now + left, resting)
    put_off(left)
  end
  redis.call('ZREM', KEYS[5], owner)
  text = if_anybody(text)
end
if held then
  if redis.call('PTTL', KEYS[4]) < left + TOKEN_KEPT then
    -- keep the last token, so that tokens grow even after a long rest
    redis.call('PEXPIRE', KEYS[4], left + TOKEN_KEPT)
  end
  -- The next waiters ask, and learn when the rest ends.
  for _, waiter in ipairs(redis.call('ZRANGE', KEYS[2], 0, 2)) do
    wake(waiter)
  end
elseif not again then
  leave(owner)
end
if tomb ~= '0' then
  redis.pcall('SET', KEYS[6], '', 'PX', tomb)
end
if not (held or again) and (not text or shared_as(text)) then
  pass(nil, text)
end
return (held or again) and 1 or 0
