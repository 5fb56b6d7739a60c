-- finish: jobs whose rows are in SQL now. ARGV[3] result TTL s [4] dead TTL s, then per job:
-- id, token, state, result, final chunk, tokens served
-- reply per job: 1 done (or done before), 0 refused: another worker holds it, or it is gone.
local result_ttl, dead_ttl, now = ARGV[3], ARGV[4], clock_ms()

-- The lane was charged an estimate at the claim; the difference is settled here.
local function settle_cost(class, tenant, estimate, served)
  local lanes = lanes_key(class)
  if served <= 0 or not redis.call('ZSCORE', lanes, tenant) then return end
  local weight = tonumber(redis.call('HGET', meta, 'weight:' .. tenant) or 1)
  redis.call('ZINCRBY', lanes, exact((served - math.max(estimate, 1)) / math.max(weight, 0.001)), tenant)
end

local function bury_job(id, key)
  redis.call('XADD', base .. 'dead', '*', 'job', id, 'error', redis.call('HGET', key, 'error') or '',
    'history', redis.call('HGET', key, 'history') or '', 'died_ms', whole(now))
  redis.call('XTRIM', base .. 'dead', 'MINID', whole(now - tonumber(dead_ttl) * 1000))
  redis.call('EXPIRE', key, dead_ttl)
end

local function finish(id, token, state, result, chunk, served)
  local key = job_key(id)
  local job = redis.call('HMGET', key, 'token', 'state', 'settled', 'worker', 'class', 'tenant', 'entry', 'cost')
  if job[1] ~= token then return 0 end
  if job[3] then return 1 end
  if (job[4] or '') == '' then return 0 end  -- given back, and not claimed since
  local class, tenant = class_of(job[5]), job[6] or ''
  leave_lane(id, class, tenant, job[7])
  let_go(id, job[4] or '', tenant)
  redis.call('ZREM', base .. 'ended', id)
  redis.call('ZREM', base .. 'deadlines', id)
  redis.call('HSET', key, 'state', state, 'result', result, 'settled', '1', 'finished_ms', whole(now))
  redis.call('HINCRBY', meta, 'finished:' .. state, 1)
  redis.call('DEL', log_key(id))
  settle_cost(class, tenant, number(job[8], 0), served)
  start_key_clock(id, state == 'dead' and tonumber(dead_ttl) or 0)
  if state == 'dead' then
    bury_job(id, key)
  else
    redis.call('HDEL', key, 'request', 'history', 'idem', 'idem_ms')
    redis.call('EXPIRE', key, result_ttl)
  end
  publish_chunk(id, chunk)
  return 1
end

local reply = {}
for first = 5, #ARGV, 6 do
  reply[#reply + 1] = finish(ARGV[first], ARGV[first + 1], ARGV[first + 2], ARGV[first + 3], ARGV[first + 4], tonumber(ARGV[first + 5]))
end
return reply
