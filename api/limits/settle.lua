-- Enter here what a gateway decided by itself while this server did not answer. Nothing is refused: it has happened.
--
-- KEYS[1]     a bucket, or places, see limits.lua
-- ARGV[1]     'units': ARGV[2] the bucket's interval, ARGV[3] how many units were taken
--             'place': ARGV[2] the request's id, ARGV[3] for how many microseconds its place is taken at most
--
-- Returns 1.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local key, number = KEYS[1], tonumber(ARGV[3])

if ARGV[1] == 'place' then
  local ttl = math.ceil(number / 1000) + 1
  redis.call('ZADD', key, string.format('%.17g', now + number), ARGV[2])
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
  return 1
end

local interval = tonumber(ARGV[2])
local used = 0
local value = redis.call('GET', key)
if value then
  local tat, was, at = string.match(value, '^(%d+) (%d+) (%d+)$')
  if tat then
    tat, was, at = tonumber(tat), tonumber(was), tonumber(at)
  else  -- as releases wrote it that knew no change of limits: the time alone
    tat, was, at = tonumber(value), interval, now
  end
  if was > interval then
    used = math.ceil((tat - at) / was) * interval - (now - at)
  else
    used = math.ceil((tat - now) / was) * interval
    if was == interval then used = tat - now end
  end
  if used < 0 then used = 0 end
end
used = used + number * interval
redis.call('SET', key, string.format('%.17g %.17g %.17g', now + used, interval, now), 'PX', math.ceil(used / 1000) + 1)
return 1
