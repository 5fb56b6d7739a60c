-- claim: deliver jobs to one worker, up to its credits.
--
-- A job that ended while it waited costs no credit: it only has to be recorded. Order: jobs of a
-- claim whose reply was lost, ended jobs, jobs that other workers gave back or lost, and then the
-- tenant streams.
--
-- Keys       meta, job:, log:, jobs:, fair_shares:, tenant:, tenants, worker:, workers, owned:,
--            ownership_versions, delayed, deadlines, requeued, unrecorded_ends, ready,
--            ready:urgent, sessions, old_sessions, held:, held_for:
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
-- Reply      1 if jobs were left to other workers for a moment, else 0; the ids of waiting jobs
--            whose hash is gone; then per job: id, token, request, deliveries, crashes, outcome,
--            created ms, started ms, attempt, 1 if it crashed alone, log, 1 if redriven, number of
--            the log's last entry
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
    if job and job.worker ~= worker then
      release_former(id, worker, job.worker, job.tenant)
    elseif job then
      if not deliver(id, job, true) then return end
    elseif not known[id] then
      release_ownership(id, worker)
    end
  end
end

-- Returns 'stays' or 'full' if the id stays in its list, nil if it leaves it.
local function deliver_one(id, costs)
  local job = read_job(id)
  if not job then note_gone(id) end
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

-- A worker that was woken this long ago and has not claimed yet is frozen or has no room.
local CALLED_MS = 1000
local kept, kept_urgent = 0, 0  -- credits beyond this worker's share

-- Limits the credits to this worker's share of the waiting jobs, while other workers are about to
-- claim too: else the first one takes a whole burst, and the others stay idle.
local function keep_to_share()
  local others = 0
  local called = redis.call('ZRANGEBYSCORE', base .. 'ready', '-inf', whole(CALLED_MS - now))
  for _, other in ipairs(called) do
    if other ~= worker then others = others + 1 end
  end
  if others == 0 then return end
  local counts = redis.call('HMGET', meta, 'queued:interactive', 'queued:standard', 'queued:bulk')
  local num_urgent = number(counts[1], 0)
  local num_waiting = num_urgent + number(counts[2], 0) + number(counts[3], 0)
  local share = math.max(1, math.ceil(num_waiting / (others + 1)))
  local urgent_share = math.max(1, math.ceil(num_urgent / (others + 1)))
  kept = math.max(0, credits - share)
  credits = credits - kept
  kept_urgent = math.max(0, urgent - math.max(0, urgent_share - credits))
  urgent = urgent - kept_urgent
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
  if redis.call('ZCARD', base .. 'requeued') > 0 then return end
  for _, class in ipairs(CLASSES) do
    local counts = redis.call('HMGET', meta, 'queued:' .. class, 'queued_tokens:' .. class)
    local is_settled = (counts[1] or '0') == '0' and (counts[2] or '0') == '0'
    if not is_settled and redis.call('ZCARD', fair_share_key(class)) == 0
      and redis.call('EXISTS', held_key(class)) == 0 then
      redis.call('HSET', meta, 'queued:' .. class, '0', 'queued_tokens:' .. class, '0')
    end
  end
end

local leaves_some, looks_again = false, false
local is_whole, trouble = pcall(function()
  sweep(now, sweep_ms, lease_ms, returns)
  if redelivers then redeliver() end
  keep_to_share()
  deliver_from('unrecorded_ends', false, 63)
  deliver_from('requeued', true, 63 + math.max(credits, 0))
  deliver_all()
  -- A worker that has taken its share claims again soon by itself, and until then is not listed as
  -- idle: so jobs that come one by one go to the others too.
  leaves_some = kept > 0 and credits <= 0 or kept_urgent > 0 and urgent <= 0
  local room = leaves_some and 0 or credits + kept
  looks_again = leaves_some or awaits_others and (credits > 0 or urgent > 0)
  register_idle('ready', room)
  register_idle('ready:urgent', (leaves_some or room > 0) and 0 or urgent + kept_urgent)
  -- More jobs wait than fit a reply.
  if is_full then redis.call(announce, base .. 'control:' .. worker, WAKE_UP) end
end)
write_counts()
if is_whole then reset_idle_counters() end
table.insert(deliveries, 1, gone)
table.insert(deliveries, 1, looks_again and 1 or 0)
return is_whole and deliveries or as_reply(trouble)
