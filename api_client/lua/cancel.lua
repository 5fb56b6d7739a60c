-- cancel: ARGV[3..] job ids. Reply per id: 'cancelled' (it waited, it is over now), 'cancelling' (it runs: its
-- worker has been told and is told again at its next append or heartbeat; or it ran and waits for its next worker, who
-- ends it), the final state if it had ended,
-- or 'unknown'. Repeating it changes nothing.
-- The message on the control channel is schemas.control.Cancel.
local now, reply = clock_ms(), {}
for place = 3, #ARGV do
  local id = ARGV[place]
  local job = redis.call('HMGET', job_key(id), 'state', 'worker')
  local state = job[1]
  if not state then
    reply[#reply + 1] = 'unknown'
  elseif is_returned(id) then  -- whoever claims it next finds out how it ended, or ends it
    redis.call('HSET', job_key(id), 'cancel', '1')
    redis.call(announce, base .. 'bell', 'cancel')
    reply[#reply + 1] = 'cancelling'
  elseif state == 'queued' or state == 'scheduled' then
    end_waiting(id, 'cancelled', nil, nil, now)
    redis.call(announce, base .. 'bell', 'cancel')
    reply[#reply + 1] = 'cancelled'
  elseif state == 'running' then
    redis.call('HSET', job_key(id), 'cancel', '1')
    redis.pcall('HDEL', base .. 'vouchers', job[2] or '')  -- its next append asks
    local message = string.char(0x82) .. pack_text('type') .. pack_text('cancel') .. pack_text('job_id') .. pack_text(id)
    redis.call(announce, base .. 'control:' .. (job[2] or ''), message)
    reply[#reply + 1] = 'cancelling'
  else
    reply[#reply + 1] = state
  end
end
return reply
