-- redrive: return dead jobs to their lanes as if they were new. ARGV[3] how many at most; ARGV[4..] job ids (none: the
-- oldest). Reply: the ids that went back. What they generated is in their result only, so they start again.
local limit, wanted, any = amount(3, 'limit', 0, MOST), {}, #ARGV < 4
if refusal then return refusal end
for place = 4, #ARGV do wanted[ARGV[place]] = true end
local revived = {}
for _, entry in ipairs(redis.call('XRANGE', base .. 'dead', '-', '+')) do
  if #revived >= limit then break end
  local id
  for place = 1, #entry[2], 2 do
    if entry[2][place] == 'job' then id = entry[2][place + 1] end
  end
  if id and (any or wanted[id]) then
    local key = job_key(id)
    local job = redis.call('HMGET', key, 'state', 'settled', 'class', 'tenant', 'cost', 'request', 'idem')
    if job[1] == 'dead' and job[2] and job[6] then
      redis.call('HDEL', key, 'settled', 'result', 'doomed', 'crashes', 'solo_crashes', 'orphaned', 'cancel', 'finished_ms',
        'worker', 'mark', 'deadline_ms', 'error', 'error_code', 'started_ms')
      redis.call('HSET', key, 'state', 'queued', 'attempt', '1')
      redis.call('PERSIST', key)
      if job[7] then redis.call('PERSIST', idem_key(job[7])) end
      redis.call('DEL', log_key(id))
      for _, field in ipairs(redis.call('HKEYS', key)) do  -- what the log told of its choices is gone with it
        if string.sub(field, 1, 6) == 'ended:' then redis.call('HDEL', key, field) end
      end
      count_queued(class_of(job[3]), 1, number(job[5], 0))
      enter_lane(id, class_of(job[3]), job[4] or '')
      revived[#revived + 1] = id
    end
    redis.call('XDEL', base .. 'dead', entry[1])
  end
end
if #revived > 0 then redis.call(announce, base .. 'bell', 'redrive') end
return revived
