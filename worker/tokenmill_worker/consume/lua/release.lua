-- release: give jobs back to the queue, and wake all workers. A call without jobs only wakes them.
--
-- Keys       meta, job:, jobs:, tenant:, held:, vouchers, delayed, returned, ended, ready,
--            ready:urgent
-- Arguments  from ARGV[3] on, per job: id, token, how, delay in ms, note (see give_back in
--            ownership.lua). If a call has exactly one crashed job, that job was alone in its
--            engine.
-- Reply      per job 1: given back, now or before; 0: refused; -1: its hash is gone
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local FIELDS, now, reply, num_crashed = 5, clock_ms(), {}, 0
check_groups(3, FIELDS)
for first = 3, #ARGV, FIELDS do
  one_of(ARGV[first + 2], 'how', {'handover', 'crash', 'retry'}, (first - 3) / FIELDS)
  amount(ARGV[first + 3], 'delay', 0, MOST, (first - 3) / FIELDS)
  if ARGV[first + 2] == 'crash' then num_crashed = num_crashed + 1 end
end
if refusal then return refusal end
for first = 3, #ARGV, FIELDS do
  local id, how = ARGV[first], ARGV[first + 2]
  local job = redis.call('HMGET', job_key(id), 'token', 'worker', 'settled')
  if job[1] ~= ARGV[first + 1] or job[3] then
    reply[#reply + 1] = job[1] and 0 or -1
  else
    if job[2] and job[2] ~= '' then
      local alone = how == 'crash' and num_crashed == 1
      give_back(id, job[2], now, how, alone, tonumber(ARGV[first + 3]), ARGV[first + 4])
    end
    reply[#reply + 1] = 1
  end
end
wake_all('release', now)
return reply
