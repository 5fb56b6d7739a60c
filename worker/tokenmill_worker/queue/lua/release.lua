-- release: give jobs back to the queue, and wake all workers. A call without jobs only wakes them.
--
-- Keys       meta, job:, jobs:, tenant:, tenants, owned:, ownership_versions, delayed, requeued,
--            unrecorded_ends, ready, ready:urgent
-- Arguments  ARGV[3]  worker
--            then per job: id, token, how, delay in ms, note (see give_back in ownership.lua). how:
--            also 'solo_crash', a crash that no other job can have caused
-- Reply      per job 1: given back, now or before; 0: refused; -1: its hash is gone
-- Errors     INVALID, with the name of the first invalid argument; nothing was written then
local FIRST, FIELDS, now, reply = 4, 5, clock_ms(), {}
check_groups(FIRST, FIELDS)
local worker = text(ARGV[3], 'worker', 1)
for first = FIRST, #ARGV, FIELDS do
  local place = (first - FIRST) / FIELDS
  one_of(ARGV[first + 2], 'how', {'handover', 'crash', 'solo_crash', 'retry'}, place)
  amount(ARGV[first + 3], 'delay', 0, MOST, place)
end
if refusal then return refusal end
for first = FIRST, #ARGV, FIELDS do
  local id, token, how, delay, note = unpack(ARGV, first, first + FIELDS - 1)
  local job = redis.call('HMGET', job_key(id), 'token', 'worker', 'settled')
  if not job[1] then
    release_ownership(id, worker)
    reply[#reply + 1] = -1
  elseif job[1] ~= token or job[3] then
    reply[#reply + 1] = 0
  else
    if job[2] and job[2] ~= '' then
      local alone = how == 'solo_crash'
      give_back(id, job[2], now, alone and 'crash' or how, alone, tonumber(delay), note)
    end
    reply[#reply + 1] = 1
  end
end
wake_all('release', now)
return reply
