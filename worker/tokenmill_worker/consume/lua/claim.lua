-- claim: deliver jobs to one worker, up to its credits.
--
-- A job that ended while it waited costs no credit: it only has to be recorded. Order: jobs of a
-- claim whose reply was lost, ended jobs, jobs that other workers gave back or lost, and then the
-- tenant streams.
--
-- Keys       meta, job:, log:, jobs:, lanes:, tenant:, worker:, workers, held:, vouchers, delayed,
--            deadlines, returned, ended, ready, ready:urgent
-- Arguments  ARGV[3]: options by name (options.lua), read at the top of delivery.lua
--   worker            who calls
--   lease_ms          how long a new worker's lease lasts
--   sweep_ms          least time between two sweeps
--   credits           how many jobs of any class it can start
--   urgent_credits    how many interactive jobs it can start beyond them
--   max_reply_bytes   the reply ends before it exceeds this; one job is always delivered
--   max_solo_crashes  crashes with no other job in the engine, after which a job is dead
--   max_crashes       crashes after which a job is dead
--   max_orphaned      deliveries that ended with the worker's disappearance, after which it is dead
--   log_ttl_s         TTL of the log of a delivered job
--   bulk_every        while bulk jobs wait, one job in this many is bulk
--   redeliver         1: the ids that follow are all jobs that this worker knows it owns; else 0
--            then the ids of jobs
-- Reply      per job: id, token, request, deliveries, crashes, outcome, created ms, started ms,
--            attempt, 1 if it crashed alone, log, 1 if redriven, number of the log's last entry
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local returns = is_registered(worker)
redis.call('SET', base .. 'worker:' .. worker, '', 'NX', 'PX', whole(lease_ms))
redis.call('SADD', base .. 'workers', worker)

-- Delivers again the jobs that this worker owns and does not know: the reply of a claim was lost.
local function redeliver()
  local known = {}
  for place = FIRST, #ARGV do known[ARGV[place]] = true end
  for _, id in ipairs(redis.call('SMEMBERS', owned)) do
    local job = not known[id] and read_job(id)
    if job then
      if not deliver(id, job, true) then return end
    elseif not known[id] then
      redis.call('SREM', owned, id)
    end
  end
end

-- Returns 'stays' or 'full' if the id stays in its list, nil if it leaves it.
local function deliver_one(id, costs)
  local job = read_job(id)
  if job and costs and not has_credit(job) then return 'stays' end
  if job and not deliver(id, job) then return 'full' end
end

-- Delivers from one list. If a key of a job has the wrong type, the job is dropped from the list,
-- so that it does not block the others.
local function deliver_from(name, costs, limit)
  for _, id in ipairs(redis.call('ZRANGE', base .. name, 0, limit)) do
    local is_whole, outcome = pcall(deliver_one, id, costs)
    if not is_whole then
      if not string.find(as_reply(outcome).err, 'WRONGTYPE', 1, true) then error(outcome, 0) end
      redis.call('HINCRBY', meta, 'entries_dropped', 1)
    end
    if is_whole and outcome == 'full' then return end
    if not is_whole or outcome ~= 'stays' then redis.call('ZREM', base .. name, id) end
  end
end

-- Registers the worker as idle while it has room left after a claim, so that submit wakes it.
-- `ready`: room for any job; `ready:urgent`: room for interactive jobs only.
local function register_idle(name, room)
  if room > 0 then
    redis.call('ZADD', base .. name, room, worker)
    redis.call('EXPIRE', base .. name, TENANT_TTL_S)
  else
    redis.call('ZREM', base .. name, worker)
  end
end

-- Resets the counters of a class in which no job waits: a damaged job or another version may have
-- left other values.
local function reset_idle_counters()
  if redis.call('ZCARD', base .. 'returned') > 0 then return end
  for _, class in ipairs(CLASSES) do
    local counts = redis.call('HMGET', meta, 'queued:' .. class, 'queued_tokens:' .. class)
    local is_settled = (counts[1] or '0') == '0' and (counts[2] or '0') == '0'
    if not is_settled and redis.call('ZCARD', fair_share_key(class)) == 0 then
      redis.call('HSET', meta, 'queued:' .. class, '0', 'queued_tokens:' .. class, '0')
    end
  end
end

local is_whole, trouble = pcall(function()
  sweep(now, sweep_ms, lease_ms, returns)
  if redelivers then redeliver() end
  deliver_from('ended', false, 63)
  deliver_from('returned', true, 63 + math.max(credits, 0))
  if credits > 0 or urgent > 0 then deliver_from_streams() end
  register_idle('ready', credits)
  register_idle('ready:urgent', credits > 0 and 0 or urgent)
  -- More jobs wait than fit a reply.
  if is_full then redis.call(announce, base .. 'control:' .. worker, WAKE_UP) end
end)
write_counts()
if is_whole then reset_idle_counters() end
return is_whole and deliveries or as_reply(trouble)
