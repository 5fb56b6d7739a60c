-- finish: acknowledge jobs whose rows SQL has committed.
--
-- Keys       meta, job:, log:, jobs:, fair_shares:, tenant:, tenants, owned:, ownership_versions,
--            idem:, dead, deadlines, unrecorded_ends
-- Arguments  ARGV[3]  worker
--            ARGV[4]  TTL of an ended job, with its result, s
--            ARGV[5]  TTL of a dead job and of its entry among the dead letters, s
--            then per job: id, token, state, result, final chunk, tokens served
-- Reply      per job 1: done, now or before, or nothing is left to do, because its hash is gone;
--            0: refused, because another worker owns the job
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local FIRST, FIELDS = 6, 6
check_groups(FIRST, FIELDS)
local worker = text(ARGV[3], 'worker', 1)
local result_ttl_s = amount(ARGV[4], 'result TTL', 0, MOST)
local dead_ttl_s = amount(ARGV[5], 'dead TTL', 0, MOST)
for first = FIRST, #ARGV, FIELDS do
  one_of(ARGV[first + 2], 'state', ENDS, (first - FIRST) / FIELDS)
  amount(ARGV[first + 5], 'tokens served', 0, MOST_COST, (first - FIRST) / FIELDS)
end
if refusal then return refusal end
local now = clock_ms()
local AT_ONCE = 1000  -- arguments per command
-- Changes of the queue are collected here and written once for all jobs, at the end.
local entries, owners, due, ends, freed, served_more, num_freed = {}, {}, {}, {}, {}, {}, 0
local tenants_of = {}  -- ids of the freed jobs of named tenants

local function count(sums, key, value) sums[key] = (sums[key] or 0) + value end

local function put(lists, key, value)
  lists[key] = lists[key] or {}
  table.insert(lists[key], value)
end

-- Runs one command for many values. If it fails, runs it for each value alone, so that a bad value
-- blocks no other.
local function for_all(list, ...)
  for first = 1, #list, AT_ONCE do
    local call = {...}
    for place = first, math.min(first + AT_ONCE - 1, #list) do call[#call + 1] = list[place] end
    local answer = redis.pcall(unpack(call))
    if type(answer) == 'table' and answer.err then
      for place = #{...} + 1, #call do
        local one = {...}
        one[#one + 1] = call[place]
        redis.pcall(unpack(one))
      end
    end
  end
end

local function leave_streams()
  for stream, tenant in pairs(owners) do
    for_all(entries[stream], 'XACK', stream, GROUP)
    for_all(entries[stream], 'XDEL', stream)
    if tenant ~= '' and redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
  end
end

-- Adds the difference between the tokens served and the estimate that the claim charged.
local function settle_costs()
  for class, tenants in pairs(served_more) do
    for tenant, difference in pairs(tenants) do
      if redis.call('ZSCORE', fair_share_key(class), tenant) then
        local weight = tonumber(redis.call('HGET', meta, 'weight:' .. tenant) or 1)
        redis.call('ZINCRBY', fair_share_key(class), exact(difference / math.max(weight, 0.001)),
          tenant)
      end
    end
  end
end

local function write_counts()
  for tenant, jobs in pairs(freed) do tenant_running(tenant, -jobs) end
  if num_freed > 0 then redis.call('HINCRBY', meta, 'running', -num_freed) end
  for state, jobs in pairs(ends) do redis.call('HINCRBY', meta, 'finished:' .. state, jobs) end
  for_all(tenants_of, 'HDEL', base .. 'tenants')
  for_all(due, 'ZREM', base .. 'unrecorded_ends')
  for_all(due, 'ZREM', base .. 'deadlines')
end

local function store_dead_letter(id, key)
  redis.call('XADD', base .. 'dead', '*', 'job', id, 'error',
    redis.call('HGET', key, 'error') or '',
    'history', redis.call('HGET', key, 'history') or '', 'died_ms', whole(now))
  redis.call('XTRIM', base .. 'dead', 'MINID', whole(math.max(0, now - dead_ttl_s * 1000)))
  redis.call('EXPIRE', key, whole(dead_ttl_s))
end

local function finish(id, token, state, result, chunk, served)
  local key = job_key(id)
  local job = redis.call('HMGET', key, 'token', 'state', 'settled', 'worker', 'class', 'tenant',
    'entry', 'cost',
    'idem')
  if not job[2] then
    release_ownership(id, worker)
    return 1
  end
  if job[1] ~= token then return 0 end
  if job[3] then return 1 end
  if (job[4] or '') == '' then return 0 end  -- given back and not claimed since
  local class, tenant = class_of(job[5]), job[6] or ''
  if job[7] and job[7] ~= '' then
    local stream = stream_key(class, tenant)
    owners[stream] = tenant
    put(entries, stream, job[7])
  end
  if redis.call('SREM', base .. 'owned:' .. job[4], id) == 1 then
    count(freed, tenant, 1)
    num_freed = num_freed + 1
    if tenant ~= '' then tenants_of[#tenants_of + 1] = id end
  end
  due[#due + 1] = id
  count(ends, state, 1)
  redis.call('HSET', key, 'state', state, 'result', result, 'settled', '1', 'finished_ms',
    whole(now))
  redis.call('DEL', log_key(id))
  if served > 0 then
    served_more[class] = served_more[class] or {}
    count(served_more[class], tenant, served - math.max(number(job[8], 0), 1))
  end
  if job[9] then start_key_clock(id, state == 'dead' and dead_ttl_s or 0) end
  if state == 'dead' then
    redis.call('HDEL', key, 'entry')
    store_dead_letter(id, key)
  else
    redis.call('HDEL', key, 'request', 'history', 'idem', 'idem_ms', 'entry')
    redis.call('EXPIRE', key, whole(result_ttl_s))
  end
  -- The end of a job that ended while it waited is published already (end_waiting of common.lua).
  if job[2] == 'running' then publish_chunk(id, chunk) end
  return 1
end

local reply = {}
local is_whole, trouble = pcall(function()
  for first = FIRST, #ARGV, FIELDS do
    local id, token, state, result, chunk, served = unpack(ARGV, first, first + 5)
    reply[#reply + 1] = finish(id, token, state, result, chunk, tonumber(served))
  end
end)
leave_streams()
settle_costs()
write_counts()
return is_whole and reply or as_reply(trouble)
