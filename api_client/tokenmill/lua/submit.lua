-- submit: store many jobs, or none of them. A repeated call finds the jobs by their ids.
--
-- Keys       meta, job:, jobs:, fair_shares:, tenant:, idem:, delayed, deadlines, ready,
--            ready:urgent
-- Arguments  ARGV[3]  largest backlog of one class that the caller accepts; 0: the queue's setting
--                     alone
--            ARGV[4]  idempotency TTL from the job's end, ms; 0: the queue's setting
--            then per job: id, class, tenant, fingerprint, idempotency key, request, created ms
--            (recorded is the server's own time), deadline ms, due ms, cost, session
-- Reply      {'ok', id, 'new' or 'known', ...}, then 'unserved' if no worker has ever served the
--            queue. {'conflict', id, place}, {'large', size, limit}, {'full', depth, limit, class},
--            {'rate', tenant, wait ms}, {'name', place}: nothing was stored
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local FIELDS, FIRST, MAX_DUE = 11, 5, 1000
check_groups(FIRST, FIELDS)
local limit = amount(ARGV[3], 'backlog limit', 0, MOST)
local idempotency_ttl = amount(ARGV[4], 'idempotency TTL', 0, MOST)
if refusal then return refusal end
local own = redis.call('HMGET', meta, 'max_queued', 'max_payload', 'idempotency_ms')
local own_limit, max_bytes = number(own[1], 0), number(own[2], 0)
if idempotency_ttl == 0 then idempotency_ttl = number(own[3], 86400000) end
local now = clock_ms()
local jobs, arriving, new_of_class, num_new, seen = {}, {}, {}, 0, {}

local function known_as(job)
  if job.idem ~= '' then
    local value = seen[job.idem] or redis.call('GET', job.idem)
    if value then
      local space = string.find(value, ' ', 1, true)
      return string.sub(value, space + 1), string.sub(value, 1, space - 1)
    end
  end
  local print = seen[job.id] or redis.call('HGET', job_key(job.id), 'fingerprint')
  if print then return job.id, print end
end

for first = FIRST, #ARGV, FIELDS do
  local place = (first - FIRST) / FIELDS
  local job = {
    id = ARGV[first],
    class = one_of(ARGV[first + 1], 'class', CLASSES, place),
    tenant = text(ARGV[first + 2], 'tenant', 0, place),
    fingerprint = ARGV[first + 3],
    idem = '',
    request = ARGV[first + 5],
    created = amount(ARGV[first + 6], 'created', 0, MOST, place),
    deadline = amount(ARGV[first + 7], 'deadline', 0, MOST, place),
    due = amount(ARGV[first + 8], 'due', 0, MOST, place),
    cost = amount(ARGV[first + 9], 'cost', 0, MOST_COST, place),
    session = text(ARGV[first + 10], 'session', 0, place),
  }
  -- `known_as` splits at the first space
  if ARGV[first + 4] ~= '' and string.find(job.fingerprint, ' ', 1, true) then
    refuse('fingerprint', 'a text without a space beside an idempotency key', job.fingerprint,
      place)
  end
  if refusal then return refusal end
  if ARGV[first + 4] ~= '' then
    -- as Keys.idempotency
    local owner = string.gsub(string.gsub(job.tenant, '%%', '%%25'), ':', '%%3A')
    job.idem_name = owner .. ':' .. ARGV[first + 4]
    job.idem = idem_key(job.idem_name)
  end
  local id, print = known_as(job)
  if id then
    if print ~= job.fingerprint then return {'conflict', id, whole(place)} end
    job.known = id
  else
    if not is_name(job.id) then return {'name', whole(place)} end
    if max_bytes > 0 and #job.request > max_bytes then
      return {'large', whole(#job.request), whole(max_bytes)}
    end
    num_new = num_new + 1
    arriving[job.tenant] = (arriving[job.tenant] or 0) + 1
    new_of_class[job.class] = (new_of_class[job.class] or 0) + 1
    seen[job.id] = job.fingerprint
    if job.idem ~= '' then seen[job.idem] = job.fingerprint .. ' ' .. job.id end
  end
  jobs[#jobs + 1] = job
end

if own_limit > 0 and (limit == 0 or own_limit < limit) then limit = own_limit end

-- Due jobs that no worker has moved into their streams yet count as waiting too.
local function count_due_of(class, due)
  local count = 0
  for _, id in ipairs(due) do
    if class_of(redis.call('HGET', job_key(id), 'class')) == class then count = count + 1 end
  end
  return count
end

-- Each class has the limit for itself: a backlog of bulk jobs refuses no interactive one.
if limit > 0 and num_new > 0 then
  local due = redis.call('ZRANGEBYSCORE', base .. 'delayed', '-inf', whole(now), 'LIMIT', 0,
    MAX_DUE)
  for class, count in pairs(new_of_class) do
    local depth = number(redis.call('HGET', meta, 'queued:' .. class), 0)
    if depth + count + #due > limit then
      depth = depth + count_due_of(class, due)
      if depth + count > limit then return {'full', whole(depth), whole(limit), class} end
    end
  end
end

-- One token bucket per tenant, filled at `rate` a second up to `burst`; `*` has the settings of
-- tenants without their own. A call with more jobs than `burst` needs a full bucket, and leaves
-- it below zero.
local function setting(name, tenant)
  local values = redis.call('HMGET', meta, name .. ':' .. tenant, name .. ':*')
  return number(values[1] or values[2], 0)
end

local buckets = {}
for tenant, count in pairs(arriving) do
  local rate = setting('rate', tenant)
  if rate > 0 then
    local burst = math.max(setting('burst', tenant), 1)
    local bucket = redis.call('HMGET', tenant_key(tenant), 'bucket', 'bucket_ms')
    local filled = math.min(burst,
      number(bucket[1], burst) + math.max(0, now - number(bucket[2], now)) * rate / 1000)
    local wanted = math.min(count, burst)
    if filled < wanted then
      return {'rate', tenant, whole(math.ceil((wanted - filled) * 1000 / rate))}
    end
    buckets[tenant] = filled - count
  end
end
for tenant, filled in pairs(buckets) do
  redis.call('HSET', tenant_key(tenant), 'bucket', exact(filled), 'bucket_ms', whole(now))
  redis.call('EXPIRE', tenant_key(tenant), TENANT_TTL_S)
end

-- Returns whether a worker has ever served this queue; then meta has `served`. Workers of earlier
-- versions do not set it, but are listed while they live, and count the jobs that they finished.
local function is_served()
  if redis.call('HGET', meta, 'served') or redis.call('EXISTS', base .. 'workers') == 1 then
    return true
  end
  for _, state in ipairs(ENDS) do
    if redis.call('HGET', meta, 'finished:' .. state) then return true end
  end
  return false
end

-- Names a session for the queue: two tenants may use one name for two sessions.
local function session_of(job)
  return string.sub(redis.sha1hex(job.tenant .. '\0' .. job.session), 1, 24)
end

-- Wakes the worker that has a job's session, if it is idle. Returns whether it has room for the
-- job, so that no other worker is needed.
local rooms = {ready = {}, ['ready:urgent'] = {}}
local function wake_holder(holder, list)
  local room = rooms[list][holder] or wake_worker(list, holder, now)
  rooms[list][holder] = room - 1
  return room > 0
end

local function reaches_holder(job, session)
  local holder = holder_of(session)
  if not holder then return false end
  return wake_holder(holder, 'ready')
    or job.class == CLASSES[1] and wake_holder(holder, 'ready:urgent')
end

local reply, queued, num_entered, num_urgent = {'ok'}, {}, 0, 0  -- for others than holders
for _, job in ipairs(jobs) do
  if not job.known then
    local waits = job.due > now
    redis.call('HSET', job_key(job.id), 'request', job.request, 'state',
      waits and 'scheduled' or 'queued',
      'class', job.class, 'tenant', job.tenant, 'fingerprint', job.fingerprint, 'created_ms',
        whole(now),
      'deadline_ms', whole(job.deadline), 'cost', whole(job.cost), 'due_ms', whole(job.due))
    if job.idem ~= '' then  -- without a TTL while the job lives; the job's end sets one
      redis.call('SET', job.idem, job.fingerprint .. ' ' .. job.id)
      redis.call('HSET', job_key(job.id), 'idem', job.idem_name, 'idem_ms', whole(idempotency_ttl))
    end
    local session = job.session ~= '' and session_of(job)
    if session then redis.call('HSET', job_key(job.id), 'session', session) end
    if job.deadline > 0 then
      redis.call('ZADD', base .. 'deadlines', whole(job.deadline), job.id)
    end
    if waits then
      redis.call('HSET', job_key(job.id), 'uncounted', '1')
      redis.call('ZADD', base .. 'delayed', whole(job.due), job.id)
    else
      local sum = queued[job.class] or {jobs = 0, cost = 0}
      sum.jobs, sum.cost = sum.jobs + 1, sum.cost + job.cost
      queued[job.class] = sum
      enter_stream(job.id, job.class, job.tenant)
      if not (session and reaches_holder(job, session)) then
        num_entered = num_entered + 1
        if job.class == CLASSES[1] then num_urgent = num_urgent + 1 end
      end
    end
  end
  reply[#reply + 1] = job.known or job.id
  reply[#reply + 1] = job.known and 'known' or 'new'
end
for class, sum in pairs(queued) do add_queued(class, sum.jobs, sum.cost) end
if num_new > 0 then redis.call('HINCRBY', meta, 'submitted', num_new) end
if num_entered > 0 then wake_for(num_entered, num_urgent, now) end
if not is_served() then reply[#reply + 1] = 'unserved' end
return reply
