-- heartbeat: renew the worker's lease, sweep the whole queue, and report which of its jobs are cancelled or lost.
-- ARGV[3] worker  [4] lease, ms  [5] sweep interval, ms  [6] status, then per job that it believes to own: id, token
-- Reply: {cancelled ids, lost ids, ids that it owns without knowing, number of orphans freed, the previous status}
check_groups(7, 2)
local worker, lease_ms, sweep_ms = text(3, 'worker', 1), amount(4, 'lease', 1, MOST), amount(5, 'sweep interval', 0, MOST)
if refusal then return refusal end
local returns = is_listed(worker)
local before = redis.pcall('GET', base .. 'worker:' .. worker)
redis.call('SET', base .. 'worker:' .. worker, ARGV[6], 'PX', whole(lease_ms))
redis.call('SADD', base .. 'workers', worker)
redis.call('HSET', meta, 'served', '1')  -- tells submit that a worker has served this queue
local cancelled, lost, strays, known = {}, {}, {}, {}
for first = 7, #ARGV, 2 do
  local id = ARGV[first]
  known[id] = true
  local job = redis.pcall('HMGET', job_key(id), 'token', 'worker', 'cancel', 'settled')  -- no valid hash: lost
  if job.err or job[1] ~= ARGV[first + 1] or job[2] ~= worker or job[4] then
    lost[#lost + 1] = id
  elseif job[3] then
    cancelled[#cancelled + 1] = id
  end
end
for _, id in ipairs(redis.call('SMEMBERS', base .. 'held:' .. worker)) do
  if not known[id] then strays[#strays + 1] = id end
end
local freed = sweep(clock_ms(), sweep_ms, lease_ms, returns)
return {cancelled, lost, strays, freed, type(before) == 'string' and before or ''}
