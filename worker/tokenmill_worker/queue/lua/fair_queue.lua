-- Part of claim: picks the next waiting job by weighted fair queueing.
--
-- Urgent classes come first, with a share of the claims for the others. Within a class the tenant
-- that was served least comes first. The fair-share index orders a class's tenants by their virtual
-- time: the estimated number of tokens served, divided by the tenant's weight. A tenant's held jobs
-- (sessions.lua) come before those in its stream.
local MAX_STREAMS = 1024
-- While jobs of the class wait, it gets one job in this many.
local SHARE = {standard = 4, bulk = bulk_every}

local function read_entry(stream)
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, READER, 'COUNT', 1, 'STREAMS', stream,
    '>')
  if type(reply) == 'table' and reply.err then
    if redis.call('EXISTS', stream) == 0 then return nil end
    -- The stream was made by hand and has no group yet.
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
    reply = redis.call('XREADGROUP', 'GROUP', GROUP, READER, 'COUNT', 1, 'STREAMS', stream, '>')
  end
  return reply and reply[1] and reply[1][2] and reply[1][2][1] or nil
end

-- Turns an entry that was added by hand, with the request in it, into a job if its name is
-- printable. Returns the id.
local function create_job_from_entry(class, tenant, entry)
  local fields = {}
  for place = 1, #entry[2], 2 do fields[entry[2][place]] = entry[2][place + 1] end
  local id, request = fields['job'], fields['request']
  if id and request and is_name(id) and string.match(id, '^[%w%p]+$')
    and redis.call('EXISTS', job_key(id)) == 0 then
    redis.call('HSET', job_key(id), 'request', request, 'state', 'queued',
      'class', class, 'tenant', tenant,
      'created_ms', string.match(entry[1], '^(%d+)-'), 'entry', entry[1])
    count_queued(class, 1, 0)
  end
  return id
end

local function read_job_of(class, tenant, entry)
  local id = create_job_from_entry(class, tenant, entry)
  local job = id and read_job(id)
  if job and job.state == 'queued' and job.entry == entry[1] then return id, job end
  if id then note_gone(id) end
  redis.call('XACK', stream_key(class, tenant), GROUP, entry[1])
  redis.call('XDEL', stream_key(class, tenant), entry[1])
  redis.call('HINCRBY', meta, 'entries_dropped', 1)
end

local tenants = {}  -- limit and weight of each tenant, read once

local function settings_of(tenant)
  if not tenants[tenant] then
    local set = redis.call('HMGET', meta, 'concurrency:' .. tenant, 'concurrency:*',
      'weight:' .. tenant)
    tenants[tenant] = {limit = tonumber(set[1] or set[2] or 0),
      weight = math.max(tonumber(set[3] or 1), 0.001)}
  end
  return tenants[tenant]
end

local function may_run(tenant)
  local limit = settings_of(tenant).limit
  if limit == 0 then return true end
  local running = tonumber(redis.call('HGET', tenant_key(tenant), 'running') or 0)
  return running + (delivered[tenant] or 0) < limit
end

-- Adds a tenant with held jobs to the fair-share index again, at the virtual time that it had when
-- its stream was empty: it has waited since then.
local function rejoin(class, tenant)
  local index = fair_share_key(class)
  if redis.call('ZSCORE', index, tenant) then return end
  local own = redis.call('HGET', tenant_key(tenant), 'served:' .. class)
    or redis.call('HGET', meta, 'served:' .. class)
  redis.call('ZADD', index, exact(number(own, 0)), tenant)
end

-- Reads a class's tenants and their virtual times. The stream of the nameless tenant is always
-- included, because entries made by hand arrive there.
local function load_class(name, held, num_held)
  for tenant in pairs(held) do rejoin(name, tenant) end
  local virtual_time = tonumber(redis.call('HGET', meta, 'served:' .. name) or 0)
  local flat = redis.call('ZRANGE', fair_share_key(name), 0, MAX_STREAMS - 1, 'WITHSCORES')
  local streams, nameless = {}, false
  for place = 1, #flat, 2 do
    streams[#streams + 1] = {tenant = flat[place], served = tonumber(flat[place + 1])}
    nameless = nameless or flat[place] == ''
  end
  if not nameless then
    table.insert(streams, 1, {tenant = '', served = virtual_time, untracked = true})
  end
  return {
    name = name, streams = streams, virtual_time = virtual_time, charged = {}, held = held,
    holds = num_held > 0, waits = #flat > 0 or num_held > 0,
    skipped = tonumber(redis.call('HGET', meta, 'skipped:' .. name) or 0),
  }
end

local function drop_stream(class, stream)
  table.remove(class.streams, 1)
  if stream.untracked then return end
  class.charged[stream] = nil
  redis.call('ZREM', fair_share_key(class.name), stream.tenant)
  redis.call('HSET', tenant_key(stream.tenant), 'served:' .. class.name, exact(stream.served))
  redis.call('EXPIRE', tenant_key(stream.tenant), TENANT_TTL_S)
end

local function charge(class, stream, cost)
  class.virtual_time = math.max(class.virtual_time, stream.served)
  stream.served = stream.served + math.max(cost, 1) / settings_of(stream.tenant).weight
  stream.untracked = false
  class.charged[stream], class.was_charged = true, true
  local place = 1
  while class.streams[place + 1] and class.streams[place + 1].served <= stream.served do
    class.streams[place] = class.streams[place + 1]
    place = place + 1
  end
  class.streams[place] = stream
end

-- Returns the next held job of a tenant.
local function next_held(class, tenant)
  local jobs = class.held[tenant] or {}
  while jobs[1] do
    local id = table.remove(jobs, 1).id
    local job = read_job(id)
    if job and job.state == 'queued' and job.held then return id, job end
  end
end

-- Returns the class's next job, held or read from its tenant's stream; nil if none may run.
local function next_of(class)
  while class.streams[1] do
    local stream = class.streams[1]
    local is_allowed = may_run(stream.tenant)
    local held, held_job
    if is_allowed then held, held_job = next_held(class, stream.tenant) end
    if held then return held, held_job, stream end
    local entry = is_allowed and read_entry(stream_key(class.name, stream.tenant))
    if entry then
      local id, job = read_job_of(class.name, stream.tenant, entry)
      if id and not pass_over(id, job) then return id, job, stream end
      class.holds = class.holds or id ~= nil
    elseif entry == false then
      -- The tenant is at its limit: its stream stays for a later claim.
      table.remove(class.streams, 1)
    else
      drop_stream(class, stream)
    end
  end
  class.waits = class.holds
end

local function order_of(classes)
  local order = {}
  for place = #classes, 1, -1 do
    local class = classes[place]
    if class.waits and SHARE[class.name] and class.skipped + 1 >= SHARE[class.name] then
      order[#order + 1] = class
    end
  end
  for _, class in ipairs(classes) do order[#order + 1] = class end
  return order
end

local function deliver_next(classes)
  for _, class in ipairs(order_of(classes)) do
    local id, job, stream = next_of(class)
    if id then
      -- The reply is full, but the entry is read: the job comes first next time.
      if not deliver(id, job) then
        if job.held then return false end
        leave_stream(id, job.class, job.tenant, redis.call('HGET', job_key(id), 'entry'))
        requeue_at_head(id, job.class, job.created)
        return false
      end
      charge(class, stream, job.cost)
      for _, other in ipairs(classes) do
        other.skipped = (other ~= class and other.waits) and other.skipped + 1 or 0
      end
      return true
    end
  end
  return false
end

-- Delivers up to `most` jobs.
local function deliver_from_streams(most, takes_any)
  local found, counts = find_held(takes_any)
  local classes = {}
  for place, name in ipairs(CLASSES) do
    classes[place] = load_class(name, found[name], counts[name])
  end
  while most > 0 and credits > 0 and deliver_next(classes) do most = most - 1 end
  local first = {classes[1]}
  while most > 0 and credits <= 0 and urgent > 0 and deliver_next(first) do most = most - 1 end
  rotate_held(found, counts)
  for _, class in ipairs(classes) do
    redis.call('HSET', meta, 'skipped:' .. class.name, class.skipped)
    for stream in pairs(class.charged) do
      redis.call('ZADD', fair_share_key(class.name), exact(stream.served), stream.tenant)
    end
    if class.was_charged then
      redis.call('HSET', meta, 'served:' .. class.name, exact(class.virtual_time))
    end
  end
end

-- Delivers from the streams while there is room; then one held job of another worker to a worker
-- that would stand idle.
local function deliver_all()
  if credits <= 0 and urgent <= 0 then return end
  deliver_from_streams(math.huge, false)
  if awaits_others and is_idle() then deliver_from_streams(1, true) end
end
