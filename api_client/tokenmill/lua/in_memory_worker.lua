-- in_memory_worker: one operation of the worker in api_client/tokenmill/testing/queue.py. Each
-- call is about one job, and calls never overlap. Only the real worker has fencing, leases and
-- fair sharing.
--
-- Keys       meta, job:, log:, jobs:, fair_shares:, idem:, delayed, deadlines, unrecorded_ends
-- Arguments  ARGV[3]  operation: promote, take, append or finish
--            ARGV[4]  job id
--            then the operation's own arguments, named below
-- Reply      promote: OK; take: the request, or nil; append: 1 if the job was cancelled; finish: 1
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local SIZES = {promote = 4, take = 5, append = 7, finish = 7}
local move, id = one_of(ARGV[3], 'move', {'promote', 'take', 'append', 'finish'}), ARGV[4] or ''
if move and #ARGV ~= SIZES[move] then
  refuse('number of arguments', tostring(SIZES[move]), tostring(#ARGV))
end
if move and move ~= 'promote' and not is_name(id) then refuse('job id', 'a name', id) end
if move == 'take' then text(ARGV[5], 'worker', 1) end
local stop = move == 'append' and not refusal
  and amount(ARGV[5], 'end of the log', end_of_log(id) + 1, MOST)
if move == 'finish' then one_of(ARGV[5], 'state', ENDS) end
if refusal then return refusal end
local key, now = job_key(id), clock_ms()

if move == 'promote' then  -- queue every job that is due
  for _, due in ipairs(redis.call('ZRANGEBYSCORE', base .. 'delayed', '-inf', whole(now))) do
    redis.call('ZREM', base .. 'delayed', due)
    local job = redis.call('HMGET', job_key(due), 'class', 'tenant', 'cost')
    redis.call('HSET', job_key(due), 'state', 'queued')
    count_due(due, job[1], number(job[3], 0))
    enter_stream(due, job[1], job[2])
  end
  return redis.status_reply('OK')
end

local job = redis.call('HMGET', key, 'state', 'class', 'tenant', 'entry', 'cost', 'request',
  'cancel')

if move == 'take' then  -- [5] worker; reply: the request, or nil if the job is not queued
  if job[1] ~= 'queued' then return false end
  leave_stream(id, job[2], job[3], job[4])
  count_queued(job[2], -1, number(job[5], 0))
  redis.call('HINCRBY', meta, 'running', 1)
  redis.call('HINCRBY', key, 'deliveries', 1)
  redis.call('HSET', key, 'state', 'running', 'worker', ARGV[5], 'started_ms', whole(now))
  return job[6]
end

-- [5] number of the log entry [6] chunk [7] '1': publish; reply: 1 if the job was cancelled
if move == 'append' then
  redis.call('XADD', log_key(id), whole(stop) .. '-0', 'chunk', ARGV[6])
  if ARGV[7] == '1' then publish_chunk(id, ARGV[6]) end
  return job[7] and 1 or 0
end

-- finish: [5] state [6] result [7] last chunk
if job[1] == 'running' then redis.call('HINCRBY', meta, 'running', -1) end
redis.call('ZREM', base .. 'unrecorded_ends', id)
redis.call('ZREM', base .. 'deadlines', id)
redis.call('HSET', key, 'state', ARGV[5], 'result', ARGV[6], 'settled', '1', 'finished_ms',
  whole(now))
redis.call('HINCRBY', meta, 'finished:' .. ARGV[5], 1)
start_key_clock(id, 0)
redis.call('HDEL', key, 'request', 'idem', 'idem_ms')
redis.call('DEL', log_key(id))
publish_chunk(id, ARGV[7])
return 1
