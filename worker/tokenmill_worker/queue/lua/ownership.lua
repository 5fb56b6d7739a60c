-- Part of every script of a worker but append, after common.lua: releases owned jobs, and sweeps
-- the jobs of dead workers. A worker is alive while its lease key `worker:<id>` exists.
--
-- Keys of a sweep  meta, job:, jobs:, fair_shares:, tenant:, tenants, workers, owned:,
--                  ownership_versions, delayed, deadlines, requeued, unrecorded_ends, ready,
--                  ready:urgent, held:, held_for:
local HISTORY_LINES = 20

local function tenant_running(tenant, change)
  local key = tenant_key(tenant)
  if redis.call('HINCRBY', key, 'running', change) < 0 then
    redis.call('HSET', key, 'running', '0')
  end
  redis.call('EXPIRE', key, TENANT_TTL_S)
end

-- Turns an error into a reply, so that the script still writes its counters after the error.
local function as_reply(trouble)
  return redis.error_reply(type(trouble) == 'table' and trouble.err or tostring(trouble))
end

-- Deletes a worker's ownership version because the set of its jobs changed: its next append then
-- checks each job (see append.lua). If the key has the wrong type, no worker has a version anyway.
local function invalidate_version(worker)
  redis.pcall('HDEL', base .. 'ownership_versions', worker)
end

-- Takes a job from the worker in whose set it is. Without `tenant`, its hash is gone, and `tenants`
-- has the tenant. Returns whether it was there.
local function release_ownership(id, worker, tenant)
  if redis.call('SREM', base .. 'owned:' .. worker, id) == 0 then return false end
  invalidate_version(worker)
  local kept = not tenant and redis.pcall('HGET', base .. 'tenants', id)
  redis.pcall('HDEL', base .. 'tenants', id)
  tenant_running(tenant or type(kept) == 'string' and kept or '', -1)
  redis.call('HINCRBY', meta, 'running', -1)
  return true
end

-- Takes a job from the worker in whose set it is, though its hash has another owner or none: it was
-- lost, and submitted again under its id. Its new owner keeps it.
local function release_former(id, worker, owner, tenant)
  if not release_ownership(id, worker, tenant) or owner == '' or tenant == '' then return end
  redis.pcall('HSET', base .. 'tenants', id, tenant)
  redis.pcall('EXPIRE', base .. 'tenants', TENANT_TTL_S)
end

local function count_up(key, field)
  redis.call('HSET', key, field, whole(number(redis.call('HGET', key, field), 0) + 1))
end

-- Adds a line to the job's history, which keeps the last HISTORY_LINES.
local function remember(key, line)
  line = string.gsub(line, '%c+', ' ')
  local history = (redis.call('HGET', key, 'history') or '') .. line .. '\n'
  local _, lines = string.gsub(history, '\n', '\n')
  if lines > HISTORY_LINES then
    history = string.gsub(history, '[^\n]*\n', '', lines - HISTORY_LINES)
  end
  redis.call('HSET', key, 'history', history)
end

-- Gives a job of the worker `owner` back to the queue. how: 'handover' (drain, never counted as a
-- crash), 'crash' (the engine died while it ran the job), 'orphan' (the worker vanished), 'retry'
-- (run again after a delay). The log stays. The token stays too, and permits no write until the
-- next claim raises it. An orphan whose log has grown since its claim counts no crash.
local function give_back(id, owner, now, how, alone, delay_ms, note)
  local key = job_key(id)
  local job = redis.call('HMGET', key, 'state', 'worker', 'class', 'tenant', 'entry', 'created_ms',
    'mark', 'cost')
  local state, worker, class, tenant = job[1], job[2] or '', class_of(job[3]), job[4] or ''
  if not state then return release_ownership(id, owner) end
  if worker ~= owner then return release_former(id, owner, worker, tenant) end
  release_ownership(id, worker, tenant)
  if state ~= 'running' then  -- it ended while it waited and only has to be recorded
    redis.call('HSET', key, 'worker', '')
    redis.call('ZADD', base .. 'unrecorded_ends', whole(now), id)
    return
  end
  leave_stream(id, class, tenant, job[5])
  if how == 'crash' or (how == 'orphan' and end_of_log(id) <= number(job[7], 0)) then
    count_up(key, 'crashes')
    if alone then count_up(key, 'solo_crashes') end
  end
  if how == 'orphan' then count_up(key, 'orphaned') end
  if how ~= 'handover' then
    remember(key, whole(now) .. ' ' .. how .. (alone and ' alone' or '') .. ' on ' .. worker
      .. (note ~= '' and ': ' .. note or ''))
  end
  if how == 'retry' then
    redis.call('HSET', key, 'attempt', whole(number(redis.call('HGET', key, 'attempt'), 1) + 1))
    redis.call('HSET', key, 'state', 'scheduled', 'worker', '', 'uncounted', '1')
    redis.call('ZADD', base .. 'delayed', whole(now + delay_ms), id)
  else
    redis.call('HSET', key, 'state', 'queued', 'worker', '')
    count_queued(class, 1, number(job[8], 0))
    requeue_at_head(id, class, number(job[6], now))
  end
end

-- Gives back every job of a worker, and removes it from all sets. Returns how many jobs it owned.
local function deregister_worker(worker, now, how)
  local ids = redis.call('SMEMBERS', base .. 'owned:' .. worker)
  for _, id in ipairs(ids) do give_back(id, worker, now, how, #ids == 1, 0, '') end
  invalidate_version(worker)
  redis.call('DEL', base .. 'owned:' .. worker)
  redis.call('DEL', base .. 'held_for:' .. worker)  -- the jobs are in `held:` too
  redis.call('SREM', base .. 'workers', worker)
  redis.call('ZREM', base .. 'ready', worker)
  redis.call('ZREM', base .. 'ready:urgent', worker)
  return #ids
end

local function promote(now)
  local num_due, num_urgent = 0, 0
  local due = redis.call('ZRANGEBYSCORE', base .. 'delayed', '-inf', whole(now), 'LIMIT', 0, 200)
  for _, id in ipairs(due) do
    redis.call('ZREM', base .. 'delayed', id)
    local job = redis.call('HMGET', job_key(id), 'state', 'class', 'tenant', 'attempt',
      'created_ms', 'cost')
    if job[1] == 'scheduled' then
      redis.call('HSET', job_key(id), 'state', 'queued')
      count_due(id, class_of(job[2]), number(job[6], 0))
      if number(job[4], 1) > 1 then  -- a retry has waited in the queue before
        requeue_at_head(id, class_of(job[2]), number(job[5], now))
      else
        enter_stream(id, class_of(job[2]), job[3] or '')
      end
      num_due = num_due + 1
      if job[2] == CLASSES[1] then num_urgent = num_urgent + 1 end
    end
  end
  if num_due > 0 then wake_for(num_due, num_urgent, now) end
end

local function expire_waiting(now)
  local late = redis.call('ZRANGEBYSCORE', base .. 'deadlines', '-inf', whole(now), 'LIMIT', 0, 200)
  for _, id in ipairs(late) do
    redis.call('ZREM', base .. 'deadlines', id)  -- the engine expires a running job
    local state = redis.call('HGET', job_key(id), 'state')
    -- The next claim finds a requeued job expired.
    if (state == 'queued' or state == 'scheduled') and not is_requeued(id) then
      end_waiting(id, 'expired', 'deadline_exceeded',
        'the deadline passed before the job was claimed', now)
    end
  end
end

-- Every live worker sweeps at least twice per lease. If no sweep ran for this share of a lease, the
-- server was probably unreachable, and leases of live workers ran out.
local OUTAGE_AFTER_LEASE_SHARE = 0.6

local function is_registered(worker)
  return redis.call('SISMEMBER', base .. 'workers', worker) == 1
end

-- Sweeps the queue at most once per interval, in the first call that is due. Returns how many
-- orphans it freed. `returns`: the calling worker was registered before. If such a worker finds
-- that no sweep ran for a while, the other workers get one lease to come back as well. A new worker
-- sweeps at once: workers that are missing then are dead.
local function sweep(now, interval_ms, lease_ms, returns)
  promote(now)
  expire_waiting(now)
  local swept = redis.call('HMGET', meta, 'swept_ms', 'sweep_from_ms')
  local last, from = number(swept[1], 0), number(swept[2], 0)
  if now >= last and now - last < interval_ms then return 0 end
  redis.call('HSET', meta, 'swept_ms', whole(now))
  if returns and now - last >= math.max(OUTAGE_AFTER_LEASE_SHARE * lease_ms,
    2 * interval_ms) then
    redis.call('HSET', meta, 'sweep_from_ms', whole(now + lease_ms))
    return 0
  end
  if now < from and from - now <= lease_ms then return 0 end
  local freed = 0
  for _, worker in ipairs(redis.call('SMEMBERS', base .. 'workers')) do
    if redis.call('EXISTS', base .. 'worker:' .. worker) == 0 then
      freed = freed + deregister_worker(worker, now, 'orphan')
    end
  end
  if freed > 0 then wake_all('orphans', now) end
  return freed
end
