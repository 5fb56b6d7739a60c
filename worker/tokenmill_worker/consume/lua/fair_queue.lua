-- Part of claim: picks the next waiting job. Urgent classes come first, with a share of the claims for the others.
-- Within a class the tenant that was served least comes first. The score of a tenant's stream (its lane) is the
-- estimated number of tokens served, divided by the tenant's weight.
local LANES_LOOKED_AT = 1024
local SHARE = {standard = 4, bulk = bulk_every}  -- while jobs of the class wait, it gets one job in this many

local function read_one(lane)
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, READER, 'COUNT', 1, 'STREAMS', lane, '>')
  if type(reply) == 'table' and reply.err then
    if redis.call('EXISTS', lane) == 0 then return nil end
    redis.call('XGROUP', 'CREATE', lane, GROUP, '0')  -- the stream was made by hand and lacks its group
    reply = redis.call('XREADGROUP', 'GROUP', GROUP, READER, 'COUNT', 1, 'STREAMS', lane, '>')
  end
  return reply and reply[1] and reply[1][2] and reply[1][2][1] or nil
end

-- Turns an entry that was added by hand, with the request in it, into a job if its name is printable. Returns the id.
local function adopt(class, tenant, entry)
  local fields = {}
  for place = 1, #entry[2], 2 do fields[entry[2][place]] = entry[2][place + 1] end
  local id, request = fields['job'], fields['request']
  if id and request and is_name(id) and string.match(id, '^[%w%p]+$') and redis.call('EXISTS', job_key(id)) == 0 then
    redis.call('HSET', job_key(id), 'request', request, 'state', 'queued', 'class', class, 'tenant', tenant,
      'created_ms', string.match(entry[1], '^(%d+)-'), 'entry', entry[1])
    count_queued(class, 1, 0)
  end
  return id
end

local function read_job_of(class, tenant, entry)
  local id = adopt(class, tenant, entry)
  local job = id and read_job(id)
  if job and job.state == 'queued' and job.entry == entry[1] then return id, job end
  redis.call('XACK', lane_key(class, tenant), GROUP, entry[1])
  redis.call('XDEL', lane_key(class, tenant), entry[1])
  redis.call('HINCRBY', meta, 'entries_dropped', 1)
end

local tenants = {}  -- limit and weight of each tenant, read once

local function settings_of(tenant)
  if not tenants[tenant] then
    local set = redis.call('HMGET', meta, 'concurrency:' .. tenant, 'concurrency:*', 'weight:' .. tenant)
    tenants[tenant] = {limit = tonumber(set[1] or set[2] or 0), weight = math.max(tonumber(set[3] or 1), 0.001)}
  end
  return tenants[tenant]
end

local function may_run(tenant)
  local limit = settings_of(tenant).limit
  if limit == 0 then return true end
  return tonumber(redis.call('HGET', tenant_key(tenant), 'running') or 0) + (taken[tenant] or 0) < limit
end

-- Reads a class's tenants and their scores. The stream of the nameless tenant is always included, because entries made
-- by hand arrive there.
local function open_class(name)
  local present = tonumber(redis.call('HGET', meta, 'served:' .. name) or 0)
  local flat = redis.call('ZRANGE', lanes_key(name), 0, LANES_LOOKED_AT - 1, 'WITHSCORES')
  local lanes, nameless = {}, false
  for place = 1, #flat, 2 do
    lanes[#lanes + 1] = {tenant = flat[place], served = tonumber(flat[place + 1])}
    nameless = nameless or flat[place] == ''
  end
  if not nameless then table.insert(lanes, 1, {tenant = '', served = present, guest = true}) end
  return {
    name = name, lanes = lanes, present = present, waits = #flat > 0, charged = {},
    skipped = tonumber(redis.call('HGET', meta, 'skipped:' .. name) or 0),
  }
end

local function close_lane(class, lane)
  table.remove(class.lanes, 1)
  if lane.guest then return end
  class.charged[lane] = nil
  redis.call('ZREM', lanes_key(class.name), lane.tenant)
  redis.call('HSET', tenant_key(lane.tenant), 'served:' .. class.name, exact(lane.served))
  redis.call('EXPIRE', tenant_key(lane.tenant), TENANT_TTL_S)
end

local function charge(class, lane, cost)
  class.present = math.max(class.present, lane.served)
  lane.served = lane.served + math.max(cost, 1) / settings_of(lane.tenant).weight
  lane.guest = false
  class.charged[lane], class.was_charged = true, true
  local place = 1
  while class.lanes[place + 1] and class.lanes[place + 1].served <= lane.served do
    class.lanes[place] = class.lanes[place + 1]
    place = place + 1
  end
  class.lanes[place] = lane
end

-- Returns the class's next job, read from its tenant's stream; nil if none may run.
local function next_of(class)
  while class.lanes[1] do
    local lane = class.lanes[1]
    local entry = may_run(lane.tenant) and read_one(lane_key(class.name, lane.tenant))
    if entry then
      local id, job = read_job_of(class.name, lane.tenant, entry)
      if id then return id, job, lane end
    elseif entry == false then
      table.remove(class.lanes, 1)  -- the tenant is at its limit: its stream stays for a later claim
    else
      close_lane(class, lane)
    end
  end
  class.waits = false
end

local function order_of(classes)
  local order = {}
  for place = #classes, 1, -1 do
    local class = classes[place]
    if class.waits and SHARE[class.name] and class.skipped + 1 >= SHARE[class.name] then order[#order + 1] = class end
  end
  for _, class in ipairs(classes) do order[#order + 1] = class end
  return order
end

local function take_next(classes)
  for _, class in ipairs(order_of(classes)) do
    local id, job, lane = next_of(class)
    if id then
      if not take(id, job) then  -- the reply is full, but the entry is read: the job comes first next time
        leave_lane(id, job.class, job.tenant, redis.call('HGET', job_key(id), 'entry'))
        to_front(id, job.class, job.created)
        return false
      end
      charge(class, lane, job.cost)
      for _, other in ipairs(classes) do
        other.skipped = (other ~= class and other.waits) and other.skipped + 1 or 0
      end
      return true
    end
  end
  return false
end

local function take_lanes()
  local classes = {}
  for place, name in ipairs(CLASSES) do classes[place] = open_class(name) end
  while credits > 0 and take_next(classes) do end
  local first = {classes[1]}
  while credits <= 0 and urgent > 0 and take_next(first) do end
  for _, class in ipairs(classes) do
    redis.call('HSET', meta, 'skipped:' .. class.name, class.skipped)
    for lane in pairs(class.charged) do redis.call('ZADD', lanes_key(class.name), exact(lane.served), lane.tenant) end
    if class.was_charged then redis.call('HSET', meta, 'served:' .. class.name, exact(class.present)) end
  end
end
