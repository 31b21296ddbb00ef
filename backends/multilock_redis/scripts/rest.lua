-- Lets the name rest: nobody's, and taken until an end by the server's own clock. KEYS 5: tombstone of this id.
-- ARGV: owner, lifetime of the tombstone in ms (0: every request of this id was answered), what is left of the rest in
-- ms, what the owner of a resting name begins with.
-- Returns 1: it was ours until now; 0: it was not, and this was a release.
-- Invariant: a resting name has an owner that no request of any id names, so nobody renews, takes or gives it back; sent
-- again, or executed late, this only ends the rest earlier. Who waits keeps its place, and gets the name when the rest is
-- over, as when a holder's lease is.

local owner, tomb, left, resting = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] .. ARGV[1]

local holder = redis.call('GET', KEYS[1])
local held = holder == owner
if held then
  -- The first write is one that a full memory does not refuse; then it cannot refuse the others either.
  redis.call('PEXPIRE', KEYS[1], left)
  redis.call('SET', KEYS[1], resting, 'PX', left)
  if redis.call('PTTL', KEYS[4]) < left + 600000 then
    redis.call('PEXPIRE', KEYS[4], left + 600000) -- else the tokens would begin anew after a long rest
  end
  -- They learn when it ends, for those whose turn it may be then.
  for _, waiter in ipairs(redis.call('ZRANGE', KEYS[2], 0, 2)) do
    wake(waiter)
  end
elseif holder == resting then
  if left < redis.call('PTTL', KEYS[1]) then
    redis.call('PEXPIRE', KEYS[1], left)
  end
else
  leave(owner)
end
if tomb ~= '0' then
  redis.pcall('SET', KEYS[5], '', 'PX', tomb)
end
if not holder then
  pass()
end
return (held or holder == resting) and 1 or 0
