-- resign: give back all jobs of a worker, and end its lease.
-- ARGV[3] worker  [4] how, as in give_back: 'handover' at the end of a drain, or after a freeze that outlasted the lease;
-- 'orphan' when a worker of the same name starts. Reply: how many jobs it owned.
text(3, 'worker', 1)
one_of(4, 'how', {'handover', 'orphan'})
if refusal then return refusal end
local num_held = strike_off(ARGV[3], clock_ms(), ARGV[4])
redis.call('DEL', base .. 'worker:' .. ARGV[3])
if num_held > 0 then redis.call(announce, base .. 'bell', 'resign') end
return num_held
