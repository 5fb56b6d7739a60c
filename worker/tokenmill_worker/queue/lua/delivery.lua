-- Part of claim: reads the options, which the head of claim.lua describes, and delivers one job.
local FIRST = 4
check_groups(FIRST, 1)
local worker = text(options.worker, 'worker', 1)
local lease_ms = amount(options.lease_ms, 'lease_ms', 1, MOST)
local sweep_ms = amount(options.sweep_ms, 'sweep_ms', 0, MOST)
local credits = amount(options.credits, 'credits', 0, MOST)
local urgent = amount(options.urgent_credits, 'urgent_credits', 0, MOST)
local max_reply_bytes = amount(options.max_reply_bytes, 'max_reply_bytes', 0, MOST)
local max_solo_crashes = amount(options.max_solo_crashes, 'max_solo_crashes', 0, MOST)
local max_crashes = amount(options.max_crashes, 'max_crashes', 0, MOST)
local max_orphaned = amount(options.max_orphaned, 'max_orphaned', 0, MOST)
local log_ttl_s = amount(options.log_ttl_s, 'log_ttl_s', 1, MOST)
local bulk_every = amount(options.bulk_every, 'bulk_every', 0, MOST)
local redelivers = amount(options.redeliver, 'redeliver', 0, 1) == 1
if refusal then return refusal end
local owned = base .. 'owned:' .. worker
local now, deliveries, bytes, is_full = clock_ms(), {}, 0, false
-- Collected here and written once, at the end: jobs delivered per tenant, and the jobs and cost
-- that left each class's backlog.
local delivered, left, num_delivered, num_started = {}, {}, 0, 0

local function write_counts()
  for tenant, count in pairs(delivered) do tenant_running(tenant, count) end
  if next(delivered) then redis.pcall('EXPIRE', base .. 'tenants', TENANT_TTL_S) end
  for class, sum in pairs(left) do add_queued(class, -sum.jobs, -sum.cost) end
  if num_delivered > 0 then redis.call('HINCRBY', meta, 'running', num_delivered) end
end

local function outcome_of(job)
  if job.state ~= 'running' and job.state ~= 'queued' then return job.state end
  if job.cancel then return 'cancelled' end
  if job.solo_crashes >= max_solo_crashes or job.crashes >= max_crashes then return 'dead' end
  if job.orphaned >= max_orphaned then return 'dead' end
  if job.deadline > 0 and job.deadline <= now then return 'expired' end
  return 'run'
end

local function read_job(id)
  if not is_id(id) then return nil end
  local raw = redis.call('HMGET', job_key(id), 'state', 'settled', 'request', 'token', 'deliveries',
    'crashes', 'solo_crashes', 'attempt', 'created_ms', 'started_ms', 'deadline_ms', 'cancel',
    'class', 'tenant', 'cost', 'orphaned',
    'entry', 'uncounted', 'redriven', 'worker', 'session', 'held')
  if not raw[1] or raw[2] or not raw[3] then return nil end
  return {
    state = raw[1], request = raw[3], token = number(raw[4], 0), deliveries = number(raw[5], 0),
    crashes = number(raw[6], 0), solo_crashes = number(raw[7], 0), attempt = number(raw[8], 1),
    created = number(raw[9], 0), started = number(raw[10], 0), deadline = number(raw[11], 0),
    cancel = raw[12], class = class_of(raw[13]), tenant = raw[14] or '', cost = number(raw[15], 0),
    orphaned = number(raw[16], 0), entry = raw[17], uncounted = raw[18], redriven = raw[19],
    worker = raw[20] or '', session = raw[21], held = raw[22],
  }
end

-- Notes a waiting job whose hash is gone, for the reply.
local gone = {}
local function note_gone(id)
  if is_id(id) and redis.call('EXISTS', job_key(id)) == 0 then gone[#gone + 1] = id end
end

-- Returns a job's log: chunks, bytes, number of the last entry. A key that another program wrote
-- is deleted, and the job starts again.
local function read_log(id)
  local chunks, size, index = {}, 0, 0
  local entries = redis.pcall('XRANGE', log_key(id), '-', '+')
  if entries.err then
    if not string.find(entries.err, 'WRONGTYPE', 1, true) then error(entries, 0) end
    redis.call('DEL', log_key(id))
    return {}, 0, 0
  end
  for _, entry in ipairs(entries) do
    chunks[#chunks + 1] = entry[2][2]
    size = size + #entry[2][2]
    index = tonumber(string.match(entry[1], '^(%d+)-'))
  end
  if #chunks > 0 then redis.call('EXPIRE', log_key(id), whole(log_ttl_s)) end
  return chunks, size, index
end

local function has_credit(job)
  return credits > 0 or (urgent > 0 and job.class == CLASSES[1]) or outcome_of(job) ~= 'run'
end

-- Notes which worker has a job of a session. When MOST_SESSIONS are in `sessions`, they become
-- `old_sessions`, and those that were there are forgotten. No job fails by an error here, for
-- example because a list of users lacks a command.
local MOST_SESSIONS, SESSION_TTL_S = 100000, 86400
local function note_session(session)
  local key, old = base .. 'sessions', base .. 'old_sessions'
  local is_new = redis.pcall('HSET', key, session, worker)
  local count = is_new == 1 and redis.pcall('HLEN', key)
  if type(count) == 'number' and count >= MOST_SESSIONS then
    redis.pcall('UNLINK', old)
    redis.pcall('RENAME', key, old)
    key = old
  end
  redis.pcall('EXPIRE', key, SESSION_TTL_S)
end

-- Adds a job to the reply. Returns false if the reply is full: the job stays where it is. `again`:
-- the worker owns the job already, but the reply that delivered it was lost.
local function deliver(id, job, again)
  local chunks, size, index = read_log(id)
  size = size + #job.request
  if #deliveries > 0 and bytes + size > max_reply_bytes then
    is_full = true
    return false
  end
  bytes = bytes + size
  local outcome = outcome_of(job)
  -- Tokens only grow, even if the server restarts without its last writes: the clock went on.
  local token = math.max(job.token + 1, now)
  local started = job.started > 0 and job.started or now
  local state = job.state
  if not again then
    job.deliveries = job.deliveries + 1
    redis.call('SADD', owned, id)
    if job.tenant ~= '' then redis.pcall('HSET', base .. 'tenants', id, job.tenant) end
    delivered[job.tenant], num_delivered = (delivered[job.tenant] or 0) + 1, num_delivered + 1
    if job.uncounted then  -- a worker of an older version moved it into its stream
      redis.call('HDEL', job_key(id), 'uncounted')
    elseif state == 'queued' then
      local sum = left[job.class] or {jobs = 0, cost = 0}
      sum.jobs, sum.cost = sum.jobs + 1, sum.cost + job.cost
      left[job.class] = sum
    end
    if state == 'queued' then state = 'running' end
    if job.held then leave_held(id, job.class, job.held) end
    if outcome == 'run' and job.session then note_session(job.session) end
  end
  redis.call('HSET', job_key(id), 'token', whole(token), 'worker', worker, 'started_ms',
    whole(started),
    'mark', whole(index), 'deliveries', whole(job.deliveries), 'state', state)
  deliveries[#deliveries + 1] = {
    id, whole(token), job.request, job.deliveries, job.crashes, outcome, whole(job.created),
      whole(started),
    job.attempt, (job.solo_crashes > 0) and 1 or 0, chunks, job.redriven and 1 or 0, whole(index),
  }
  if outcome == 'run' then
    if credits > 0 then credits = credits - 1 else urgent = urgent - 1 end
    num_started = num_started + 1
  end
  return true
end
