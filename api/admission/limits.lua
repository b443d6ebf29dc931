-- Take one request's cost from every bucket of a customer, or from none (generic cell rate algorithm, integer microseconds).
--
-- KEYS[1..n]   bucket: string, the theoretical arrival time (TAT) in microseconds of Redis' clock; absent means full
-- KEYS[n+1]    set of the customer's revoked key ids
--              All keys carry the same {customer} hash tag, so they share a cluster slot.
-- ARGV[1]      id of the calling key
-- ARGV[3i-1], ARGV[3i], ARGV[3i+1]   for bucket i: interval (microseconds per unit), burst (units), cost (units)
--
-- Returns {state, now, retry_after, remaining_1, reset_1, ..., remaining_n, reset_n}
--   state        1 taken, 0 refused (nothing was taken from any bucket), -1 the key is revoked (nothing else is returned)
--   now          Redis' clock, microseconds; the only clock that counts
--   retry_after  microseconds until the same call would pass, 0 when taken
--   remaining_i  units left in bucket i after this call
--   reset_i      microseconds until bucket i is full again
--
-- Numbers stay below 2^53, where Lua's doubles are exact; they are stored with all digits, because tostring() keeps 14.

if redis.call('SISMEMBER', KEYS[#KEYS], ARGV[1]) == 1 then
  local time = redis.call('TIME')
  return {-1, time[1] * 1000000 + time[2]}
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local count = #KEYS - 1
local stored = {}
local after = {}
local retry_after = 0

for i = 1, count do
  local interval, burst, cost = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1])
  local tat = tonumber(redis.call('GET', KEYS[i]) or now) or now
  if tat < now then tat = now end
  stored[i] = tat
  after[i] = tat + cost * interval
  local excess = after[i] - now - burst * interval
  if excess > retry_after then retry_after = excess end
end

local state = 0
if retry_after == 0 then
  state = 1
  for i = 1, count do
    -- The key may go once the bucket is full again: one millisecond late, never early.
    redis.call('SET', KEYS[i], string.format('%.17g', after[i]), 'PX', math.ceil((after[i] - now) / 1000) + 1)
  end
end

local answer = {state, now, retry_after}
for i = 1, count do
  local interval, burst = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  local tat = state == 1 and after[i] or stored[i]
  local remaining = math.floor((burst * interval - (tat - now)) / interval)
  answer[2 * i + 2] = remaining > 0 and remaining or 0
  answer[2 * i + 3] = tat - now
end
return answer
