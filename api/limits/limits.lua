-- Decide one call, all of it or nothing: units of every bucket (generic cell rate algorithm in whole microseconds), a
-- place among the unfinished requests, and money under the customer's cap. Everything is tested before anything is
-- written; a refused call takes nothing. The clock is Redis' own.
--
-- KEYS[1]             set of the customer's revoked key ids
-- KEYS[2..n+1]        bucket: string "<tat> <interval> <at>": the theoretical arrival time (the moment when the bucket is
--                     full again), the interval it is reckoned in, and when it was written; absent means full
-- KEYS[n+2..n+m+1]    places: sorted set, member is a request's id, score the moment from which its place is free
-- KEYS[n+m+2]         money, if asked for: hash, "<second of admission>" -> millionths reserved by the requests of that
--                     second; "since" -> the first second from which on nothing is missing here, as long as the server's
--                     run is "run"
--                     All keys carry the same {customer} hash tag, so they share a cluster slot.
-- ARGV[1..4]          id of the calling key; n; m; 1 if money is asked for, else 0
-- then for each bucket    interval (microseconds per unit), burst (units), unit (1 requests, 2 items, 3 tokens)
-- then for each places    how many at most
-- then what this call takes    requests, items, tokens
-- then if m > 0           the request's id; for how many microseconds its place is taken at most
-- then if money is asked for   millionths left beyond what the ledger has; the second before which the ledger has all;
--                     the second of admission; the most this call can cost
--
-- Returns {1, now, 0, remaining_1, reset_1, ..., remaining_n, reset_n}            taken
--         {0, now, retry_after, remaining_1, reset_1, ..., remaining_n, reset_n}  a bucket does not hold enough
--         {-1, now}          the key is revoked
--         {-2, now, j}       the j-th places are all taken
--         {-3, now, open}    the money does not reach: so many millionths are reserved
--         {-4, now, since}   what is reserved here is known from that second on only
--   now          Redis' clock, microseconds; the only clock that counts
--   retry_after  microseconds until the same call would pass
--   remaining_i  units left in bucket i after this call
--   reset_i      microseconds until bucket i is full again
--
-- Numbers stay below 2^53, where Lua's doubles are exact; they are stored with all digits, because tostring() keeps 14.
--
-- A limit may change between two calls. What was used stays used, in units; since it was taken the bucket has filled at
-- the faster of the two rates. So a raised limit is felt at once, a lowered one from the first call that passes it, and a
-- bucket that is full by one of them is never half empty because its key had expired by then.

-- Seconds of reservations that are kept beyond the newest word of the ledger, for processes that have heard an older one.
local KEPT_S = 60
-- Clocks of the processes that stamp admissions may be this far from Redis' clock.
local SKEW_S = 2

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then
  return {-1, now}
end

local count, places, has_money = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local said = 4 + 3 * count + places
local used = {}
local pace = {}
local cost = {}
local retry_after = 0

for i = 1, count do
  local interval, burst = tonumber(ARGV[3 * i + 2]), tonumber(ARGV[3 * i + 3])
  cost[i] = tonumber(ARGV[said + ARGV[3 * i + 4]])
  -- Microseconds until the bucket is full again, at the pace at which it fills until this call.
  used[i], pace[i] = 0, interval
  local value = redis.call('GET', KEYS[i + 1])
  if value then
    local tat, was, at = string.match(value, '^(%d+) (%d+) (%d+)$')
    if tat then
      tat, was, at = tonumber(tat), tonumber(was), tonumber(at)
    else  -- as releases wrote it that knew no change of limits: the time alone
      tat, was, at = tonumber(value), interval, now
    end
    if was > interval then
      used[i] = math.ceil((tat - at) / was) * interval - (now - at)
    else
      used[i], pace[i] = tat - now, was
    end
    if used[i] < 0 then used[i] = 0 end
  end
  local excess = used[i] - (burst - cost[i]) * pace[i]
  if excess > retry_after then retry_after = excess end
end

if retry_after > 0 then
  local answer = {0, now, retry_after}
  for i = 1, count do
    local remaining = math.floor((tonumber(ARGV[3 * i + 3]) * pace[i] - used[i]) / pace[i])
    answer[2 * i + 2] = remaining > 0 and remaining or 0
    answer[2 * i + 3] = used[i]
  end
  return answer
end

local moment = string.format('%.17g', now)
local request = ARGV[said + 4]
for j = 1, places do
  local key = KEYS[count + 1 + j]
  local own = redis.call('ZSCORE', key, request)
  -- A request that is admitted once more has its place already.
  if not (own and tonumber(own) > now)
    and redis.call('ZCOUNT', key, '(' .. moment, '+inf') >= tonumber(ARGV[4 + 3 * count + j]) then
    return {-2, now, j}
  end
end

local gone = {}
local since, second, price
if has_money then
  local money, at = KEYS[#KEYS], #ARGV - 4
  local left, settled = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  second, price = tonumber(ARGV[at + 3]), ARGV[at + 4]
  if second < settled then second = settled end
  since = tonumber(redis.call('HGET', money, 'since'))
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or '-'
  if not since or redis.call('HGET', money, 'run') ~= run then
    -- What was reserved before this moment, if anything, is forgotten, or was by a server that has come back with an
    -- earlier state. The ledger will have it once it is past this.
    since = math.floor(now / 1000000) + 1 + SKEW_S
    redis.call('HSET', money, 'since', string.format('%.17g', since), 'run', run)
  end
  if settled < since then
    return {-4, now, since}
  end
  local open = 0
  local reserved = redis.call('HGETALL', money)
  for k = 1, #reserved, 2 do
    local of = tonumber(reserved[k])
    if of and of >= settled then
      open = open + tonumber(reserved[k + 1])
    elseif of and of < settled - KEPT_S then
      gone[#gone + 1] = reserved[k]
    end
  end
  if open + tonumber(price) > left then
    return {-3, now, open}
  end
  if settled - KEPT_S > since then since = settled - KEPT_S else since = nil end
end

local answer = {1, now, 0}
for i = 1, count do
  local interval, burst = tonumber(ARGV[3 * i + 2]), tonumber(ARGV[3 * i + 3])
  local after = used[i]
  if pace[i] ~= interval then after = math.ceil(after / pace[i]) * interval end
  after = after + cost[i] * interval
  -- The key may go once the bucket is full again: one millisecond late, never early.
  redis.call('SET', KEYS[i + 1], string.format('%.17g %.17g %.17g', now + after, interval, now),
    'PX', math.ceil(after / 1000) + 1)
  answer[2 * i + 2] = math.floor((burst * interval - after) / interval)
  answer[2 * i + 3] = after
end
if places > 0 then
  local lasts = tonumber(ARGV[said + 5])
  local free_at = string.format('%.17g', now + lasts)
  for j = 1, places do
    local key = KEYS[count + 1 + j]
    redis.call('ZREMRANGEBYSCORE', key, '-inf', moment)
    redis.call('ZADD', key, free_at, request)
    local ttl = math.ceil(lasts / 1000) + 1
    if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
  end
end
if has_money then
  local money = KEYS[#KEYS]
  if since then redis.call('HSET', money, 'since', string.format('%.17g', since)) end
  if #gone > 0 then redis.call('HDEL', money, unpack(gone)) end
  redis.call('HINCRBY', money, string.format('%.17g', second), price)
end
return answer
