-- Extends shared locks. KEYS: lock, token, holders of each; ARGV: owner, ttl ms of each. Returns 1 or 0 (no longer the
-- owner's) for each. Invariant: as renew. A lease that has ended, or that was granted under another marker, is not
-- extended.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i = 1, #KEYS, 3 do
  local lock, token, holders = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local owner, ttl = ARGV[#answers * 2 + 1], tonumber(ARGV[#answers * 2 + 2])
  local text = redis.pcall('GET', lock)
  if type(text) == 'table' and not string.find(text.err, 'WRONGTYPE', 1, true) then
    return text
  end
  local ours = false
  if type(text) == 'string' and string.match(text, '^#multilock:[rp]%d*:%d+$') then
    -- This comes first: a full memory refuses ZADD, except after such a write.
    redis.call('ZREMRANGEBYSCORE', holders, '-inf', now)
    ours = redis.call('ZSCORE', holders, owner)
  end
  if ours then
    redis.call('ZADD', holders, now + ttl, owner)
    if redis.call('PTTL', lock) < ttl then -- seldom, as in `put_off`
      redis.call('PEXPIRE', lock, math.ceil(ttl * 1.5))
      redis.call('PEXPIRE', holders, math.ceil(ttl * 1.5))
    end
    if redis.call('PTTL', token) < ttl + TOKEN_KEPT / 2 then
      redis.call('PEXPIRE', token, ttl + TOKEN_KEPT)
    end
  else
    local wrote = redis.pcall('ZREM', holders, owner) -- as in renew
    if type(wrote) == 'table' and string.find(wrote.err, 'READONLY', 1, true) then
      return wrote
    end
  end
  answers[#answers + 1] = ours and 1 or 0
end
return answers
