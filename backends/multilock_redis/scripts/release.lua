-- Gives the lock back, or leaves the queue, whichever applies. KEYS 5: tombstone of this id.
-- ARGV: owner, lifetime of the tombstone in ms (0: every request of this id was answered).
-- Returns 1: it was ours until now; 0: it was not.
-- Invariant: afterwards this owner neither holds nor waits; with a tombstone it never will, though a request of it may
-- still be on its way. Nothing of anybody else changes, except that the first waiter becomes the holder.

local owner, tomb = ARGV[1], ARGV[2]

local held = redis.call('GET', KEYS[1]) == owner
local queue = redis.call('EXISTS', KEYS[2]) == 1
if queue or tomb ~= '0' then
  leave(owner)
end
if tomb ~= '0' then
  -- After the first write, so that a full memory cannot refuse it; in pcall, so that nothing else can.
  redis.pcall('SET', KEYS[5], '', 'PX', tomb)
end
if not held then
  return 0
end
if not (queue and pass()) then
  redis.call('DEL', KEYS[1])
end
return 1
