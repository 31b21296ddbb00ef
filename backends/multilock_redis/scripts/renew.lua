-- Prolongs locks. KEYS: lock, token of each; ARGV: owner, ttl ms of each. Returns 1 or 0 (not its any more) for each.
-- Invariant: a lock that is not this owner's is left as it is; sets the rest of the life, never adds to it.

local answers = {}
for i = 1, #KEYS, 2 do
  local lock, token = KEYS[i], KEYS[i + 1]
  local holder = redis.pcall('GET', lock)
  if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
    return holder
  end
  if holder == ARGV[i] then
    redis.call('PEXPIRE', lock, ARGV[i + 1])
    -- The counter lives at least as long as the lock: inspect() tells the token of a lock held for days.
    if redis.call('PTTL', token) < 300000 then
      redis.call('PEXPIRE', token, 600000)
    end
    -- Read last: a tracked connection hears of changes after its last read only.
    redis.call('GET', lock)
    answers[#answers + 1] = 1
  else
    answers[#answers + 1] = 0
  end
end
return answers
