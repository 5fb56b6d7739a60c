-- resign: ARGV[3] worker [4] how, as in give_back: 'hand' at the end of a drain or of a freeze that outlasted the
-- lease; 'orphan' when a worker of the same name starts anew. It holds nothing any more. Reply: how many it held.
local worker, how, now = ARGV[3], ARGV[4], clock_ms()
local ids = redis.call('SMEMBERS', base .. 'held:' .. worker)
for _, id in ipairs(ids) do give_back(id, now, how, #ids == 1, 0, '') end
redis.call('DEL', base .. 'worker:' .. worker, base .. 'held:' .. worker)
redis.call('SREM', base .. 'workers', worker)
redis.call('ZREM', base .. 'ready', worker)
redis.call('ZREM', base .. 'ready:urgent', worker)
if #ids > 0 then redis.call(announce, base .. 'bell', 'resign') end
return #ids
