-- A request is over: its places are free. Doing it twice does no harm.
--
-- KEYS        places: sorted sets of request ids, see limits.lua; all with the same {customer} hash tag
-- ARGV[1]     the request's id
--
-- Returns how many places it had.

local freed = 0
for j = 1, #KEYS do
  freed = freed + redis.call('ZREM', KEYS[j], ARGV[1])
end
return freed
