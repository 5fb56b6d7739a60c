-- cancel: end waiting jobs and stop running ones. Repeating the call changes nothing.
--
-- A running job's worker gets tokenmill_schemas.control.Cancel on its control channel, and a flag
-- in the reply to its next append or heartbeat.
--
-- Keys       meta, job:, jobs:, ownership_versions, requeued, delayed, deadlines, unrecorded_ends,
--            held:, held_for:
-- Arguments  from ARGV[3] on: job ids
-- Reply      per job 'cancelled': it was waiting and has ended now; 'cancelling': it is running, or
--            ran before and its next worker ends it; 'unknown'; or the state in which it had ended
-- Errors     INVALID, if the key base or the publish command is wrong; nothing was written then
local now, reply = clock_ms(), {}
for place = 3, #ARGV do
  local id = ARGV[place]
  local job = redis.call('HMGET', job_key(id), 'state', 'worker')
  local state = job[1]
  if not state then
    reply[#reply + 1] = 'unknown'
  elseif is_requeued(id) then  -- the worker that claims it next looks up how it ended, or ends it
    redis.call('HSET', job_key(id), 'cancel', '1')
    redis.call(announce, base .. 'wake_up', 'cancel')
    reply[#reply + 1] = 'cancelling'
  elseif state == 'queued' or state == 'scheduled' then
    end_waiting(id, 'cancelled', nil, nil, now)
    redis.call(announce, base .. 'wake_up', 'cancel')
    reply[#reply + 1] = 'cancelled'
  elseif state == 'running' then
    redis.call('HSET', job_key(id), 'cancel', '1')
    -- so that the worker's next append checks its jobs
    redis.pcall('HDEL', base .. 'ownership_versions', job[2] or '')
    local message = string.char(0x82) .. pack_text('type') .. pack_text('cancel')
      .. pack_text('job_id') .. pack_text(id)
    redis.call(announce, base .. 'control:' .. (job[2] or ''), message)
    reply[#reply + 1] = 'cancelling'
  else
    reply[#reply + 1] = state
  end
end
return reply
