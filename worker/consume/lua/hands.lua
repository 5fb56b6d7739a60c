-- Shared by the worker's scripts, after common.lua: how a running job leaves a worker's hands, and the sweep
-- that takes jobs out of dead hands. A worker lives while its lease key `worker:<id>` does.
local HISTORY_LINES = 20

local function tenant_running(tenant, change)
  local key = tenant_key(tenant)
  if redis.call('HINCRBY', key, 'running', change) < 0 then redis.call('HSET', key, 'running', '0') end
  redis.call('EXPIRE', key, TENANT_TTL_S)
end

-- What is counted on the way is written in the end, whatever stopped the script before.
local function as_reply(trouble)
  return redis.error_reply(type(trouble) == 'table' and trouble.err or tostring(trouble))
end

-- What a worker holds is changed: its next append asks for each job (see append.lua). Where somebody has made something else of
-- the key, nobody has a voucher.
local function void_voucher(worker) redis.pcall('HDEL', base .. 'vouchers', worker) end

local function let_go(id, worker, tenant)
  if redis.call('SREM', base .. 'held:' .. worker, id) == 0 then return end
  void_voucher(worker)
  tenant_running(tenant, -1)
  redis.call('HINCRBY', meta, 'running', -1)
end

local function count_up(key, field)
  redis.call('HSET', key, field, whole(number(redis.call('HGET', key, field), 0) + 1))
end

local function remember(key, line)
  local history = (redis.call('HGET', key, 'history') or '') .. line .. '\n'
  local _, lines = string.gsub(history, '\n', '\n')
  if lines > HISTORY_LINES then history = string.gsub(history, '^[^\n]*\n', '', lines - HISTORY_LINES) end
  redis.call('HSET', key, 'history', history)
end

-- how: 'hand' (drain, never a crash), 'crash' (its engine died under it), 'orphan' (its worker vanished),
-- 'retry' (runs again after a delay), 'dead' (to be set aside). The log stays, the token stays with the last holder
-- and is worth nothing until the next claim raises it. An orphan that had made progress is not suspected.
local function give_back(id, now, how, alone, delay_ms, note)
  local key = job_key(id)
  local job = redis.call('HMGET', key, 'state', 'worker', 'class', 'tenant', 'entry', 'created_ms', 'mark', 'cost')
  local state, worker, class, tenant = job[1], job[2] or '', class_of(job[3]), job[4] or ''
  if not state then return end
  let_go(id, worker, tenant)
  if state ~= 'running' then  -- it ended while it waited, and was only to be written down
    redis.call('HSET', key, 'worker', '')
    redis.call('ZADD', base .. 'ended', whole(now), id)
    return
  end
  leave_lane(id, class, tenant, job[5])
  if how == 'crash' or (how == 'orphan' and end_of_log(id) <= number(job[7], 0)) then
    count_up(key, 'crashes')
    if alone then count_up(key, 'solo_crashes') end
  end
  if how == 'orphan' then count_up(key, 'orphaned') end
  if how ~= 'hand' then
    remember(key, whole(now) .. ' ' .. how .. (alone and ' alone' or '') .. ' on ' .. worker .. (note ~= '' and ': ' .. note or ''))
  end
  if how == 'dead' then redis.call('HSET', key, 'doomed', note) end
  if how == 'retry' then
    redis.call('HSET', key, 'attempt', whole(number(redis.call('HGET', key, 'attempt'), 1) + 1))
    redis.call('HSET', key, 'state', 'scheduled', 'worker', '', 'uncounted', '1')
    redis.call('ZADD', base .. 'delayed', whole(now + delay_ms), id)
  else
    redis.call('HSET', key, 'state', 'queued', 'worker', '')
    count_queued(class, 1, number(job[8], 0))
    to_front(id, class, number(job[6], now))
  end
end

-- All that it held goes out of its hands, and nobody calls it. Returns how many it held.
local function strike_off(worker, now, how)
  local ids = redis.call('SMEMBERS', base .. 'held:' .. worker)
  for _, id in ipairs(ids) do give_back(id, now, how, #ids == 1, 0, '') end
  void_voucher(worker)
  redis.call('DEL', base .. 'held:' .. worker)
  redis.call('SREM', base .. 'workers', worker)
  redis.call('ZREM', base .. 'ready', worker)
  redis.call('ZREM', base .. 'ready:urgent', worker)
  return #ids
end

local function promote(now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. 'delayed', '-inf', whole(now), 'LIMIT', 0, 200)) do
    redis.call('ZREM', base .. 'delayed', id)
    local job = redis.call('HMGET', job_key(id), 'state', 'class', 'tenant', 'attempt', 'created_ms', 'cost')
    if job[1] == 'scheduled' then
      redis.call('HSET', job_key(id), 'state', 'queued')
      count_due(id, class_of(job[2]), number(job[6], 0))
      if number(job[4], 1) > 1 then  -- a retry has queued once already
        to_front(id, class_of(job[2]), number(job[5], now))
      else
        enter_lane(id, class_of(job[2]), job[3] or '')
      end
    end
  end
end

local function expire_waiting(now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. 'deadlines', '-inf', whole(now), 'LIMIT', 0, 200)) do
    redis.call('ZREM', base .. 'deadlines', id)  -- of a running job the engine takes care
    local state = redis.call('HGET', job_key(id), 'state')
    if (state == 'queued' or state == 'scheduled') and not is_returned(id) then  -- else the next claim sees to it
      end_waiting(id, 'expired', 'deadline_exceeded', 'the deadline passed before the job was claimed', now)
    end
  end
end

-- Who lives sweeps at least twice in a lease. Where nobody did for this part of one, the server was perhaps out of
-- everybody's reach while leases ran out.
local UNSWEPT = 0.6

local function is_listed(worker) return redis.call('SISMEMBER', base .. 'workers', worker) == 1 end

-- At most once per interval for the whole queue, by whoever comes first. Returns how many orphans it freed.
-- `returns`: the caller was there before. If nobody swept for a while, and he is the first to come back, the others have a
-- lease to do so too. Who comes new finds nobody's jobs but the dead's.
local function sweep(now, interval_ms, lease_ms, returns)
  promote(now)
  expire_waiting(now)
  local swept = redis.call('HMGET', meta, 'swept_ms', 'sweep_from_ms')
  local last, from = number(swept[1], 0), number(swept[2], 0)
  if now >= last and now - last < interval_ms then return 0 end
  redis.call('HSET', meta, 'swept_ms', whole(now))
  if returns and last > 0 and now - last >= math.max(UNSWEPT * lease_ms, 2 * interval_ms) then
    redis.call('HSET', meta, 'sweep_from_ms', whole(now + lease_ms))
    return 0
  end
  if now < from and from - now <= lease_ms then return 0 end
  local freed = 0
  for _, worker in ipairs(redis.call('SMEMBERS', base .. 'workers')) do
    if redis.call('EXISTS', base .. 'worker:' .. worker) == 0 then
      freed = freed + strike_off(worker, now, 'orphan')
    end
  end
  if freed > 0 then redis.call(announce, base .. 'bell', 'orphans') end
  return freed
end
