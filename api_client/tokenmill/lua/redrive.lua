-- redrive: return dead jobs to their streams as new jobs without a deadline. The jobs start again
-- from the beginning, because only their result has what they generated. One call reads at most
-- PAGE entries of the dead-letter stream.
--
-- Keys       meta, job:, jobs:, fair_shares:, idem:, dead, ready, ready:urgent
-- Arguments  ARGV[3]  largest number of jobs
--            ARGV[4]  start: '-', or the first value of the previous reply
--            then job ids; none: the oldest dead jobs
-- Reply      start of the next call ('' at the end), then the ids of the jobs that were returned
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local PAGE, FIRST = 500, 5
check_groups(FIRST, 1)
local limit, start = amount(ARGV[3], 'limit', 0, MOST), ARGV[4] or ''
local ms, number_in_ms = string.match(start, '^%((%d+)%-(%d+)$')
if start ~= '-' and not (ms and tonumber(ms) < MOST and tonumber(number_in_ms) < MOST) then
  refuse('start', '-, or a bracket and the id of an entry', start)
end
if refusal then return refusal end
local wanted, any = {}, #ARGV < FIRST
for place = FIRST, #ARGV do wanted[ARGV[place]] = true end
local entries = redis.call('XRANGE', base .. 'dead', start, '+', 'COUNT', PAGE)
local revived, after = {}, start
for _, entry in ipairs(entries) do
  if #revived >= limit then break end
  after = '(' .. entry[1]
  local id
  for place = 1, #entry[2], 2 do
    if entry[2][place] == 'job' then id = entry[2][place + 1] end
  end
  if id and (any or wanted[id]) then
    local key = job_key(id)
    local job = redis.call('HMGET', key, 'state', 'settled', 'class', 'tenant', 'cost', 'request',
      'idem')
    if job[1] == 'dead' and job[2] and job[6] then
      redis.call('HDEL', key, 'settled', 'result', 'crashes', 'solo_crashes', 'orphaned',
        'cancel', 'finished_ms', 'worker', 'mark', 'deadline_ms', 'error', 'error_code',
        'started_ms', 'held')
      redis.call('HSET', key, 'state', 'queued', 'attempt', '1', 'redriven', '1')
      redis.call('PERSIST', key)
      if job[7] then redis.call('PERSIST', idem_key(job[7])) end
      count_queued(class_of(job[3]), 1, number(job[5], 0))
      enter_stream(id, class_of(job[3]), job[4] or '')
      revived[#revived + 1] = id
    end
    redis.call('XDEL', base .. 'dead', entry[1])
  end
end
if #revived > 0 then wake_all('redrive', clock_ms()) end
local is_end = #entries < PAGE and (#entries == 0 or after == '(' .. entries[#entries][1])
table.insert(revived, 1, is_end and '' or after)
return revived
