-- heartbeat: renew the worker's lease, sweep the whole queue, and report which of its jobs are
-- cancelled or lost.
--
-- Keys       meta, worker:, workers, and those of a sweep (ownership.lua)
-- Arguments  ARGV[3]: options by name (options.lua)
--   worker    who calls
--   lease_ms  how long the lease lasts from now
--   sweep_ms  least time between two sweeps
--            ARGV[4]: the worker's status, stored under its lease
--            then per job that the worker believes to own: id, token
-- Reply      {cancelled ids, lost ids, ids that it owns and did not name, number of orphans freed,
--            the previous status, the server's time in microseconds, those lost ids that have no
--            job hash any more}
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local FIRST = 5
check_groups(FIRST, 2)
local worker = text(options.worker, 'worker', 1)
local lease_ms = amount(options.lease_ms, 'lease_ms', 1, MOST)
local sweep_ms = amount(options.sweep_ms, 'sweep_ms', 0, MOST)
if refusal then return refusal end
local returns = is_registered(worker)
local before = redis.pcall('GET', base .. 'worker:' .. worker)
redis.call('SET', base .. 'worker:' .. worker, ARGV[4], 'PX', whole(lease_ms))
redis.call('SADD', base .. 'workers', worker)
redis.call('HSET', meta, 'served', '1')  -- tells submit that a worker has served this queue
local cancelled, lost, gone, unacknowledged, known = {}, {}, {}, {}, {}
for first = FIRST, #ARGV, 2 do
  local id = ARGV[first]
  known[id] = true
  -- Without a valid hash this fails, and the job counts as lost.
  local job = redis.pcall('HMGET', job_key(id), 'token', 'worker', 'cancel', 'settled',
    'tenant')
  if job.err or job[1] ~= ARGV[first + 1] or job[2] ~= worker or job[4] then
    lost[#lost + 1] = id
    if job.err or not job[1] then
      gone[#gone + 1] = id
      release_ownership(id, worker)
    elseif job[2] ~= worker then
      release_former(id, worker, job[2] or '', job[5] or '')
    end
  elseif job[3] then
    cancelled[#cancelled + 1] = id
  end
end
for _, id in ipairs(redis.call('SMEMBERS', base .. 'owned:' .. worker)) do
  if not known[id] then unacknowledged[#unacknowledged + 1] = id end
end
local freed = sweep(clock_ms(), sweep_ms, lease_ms, returns)
local time = redis.call('TIME')
return {cancelled, lost, unacknowledged, freed, type(before) == 'string' and before or '',
  string.format('%s%06d', time[1], time[2]), gone}
