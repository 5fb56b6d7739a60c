-- resign: give back all jobs of a worker, and end its lease.
--
-- Keys       meta, job:, jobs:, tenant:, tenants, worker:, workers, owned:, ownership_versions,
--            requeued, unrecorded_ends, ready, ready:urgent, held_for:
-- Arguments  ARGV[3]  worker
--            ARGV[4]  how, as in give_back: 'handover' at the end of a drain, or after a freeze
--                     that outlasted the lease; 'orphan' when a worker of the same name starts
-- Reply      how many jobs it owned
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
text(ARGV[3], 'worker', 1)
one_of(ARGV[4], 'how', {'handover', 'orphan'})
if refusal then return refusal end
local now = clock_ms()
local num_owned = deregister_worker(ARGV[3], now, ARGV[4])
redis.call('DEL', base .. 'worker:' .. ARGV[3])
if num_owned > 0 then wake_all('resign', now) end
return num_owned
