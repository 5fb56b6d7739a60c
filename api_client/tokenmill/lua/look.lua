-- look: tell whether jobs have changed, for all silent streams of a client at once.
--
-- Keys       job:, log:
-- Arguments  from ARGV[3] on: job ids
-- Reply      per job a text that differs after each change that its readers see
-- Errors     INVALID, if the key base or the publish command is wrong
local reply = {}
for place = 3, #ARGV do
  local id = ARGV[place]
  local job = redis.call('HMGET', job_key(id), 'state', 'settled', 'attempt', 'worker')
  local last = redis.pcall('XREVRANGE', base .. 'log:' .. id, '+', '-', 'COUNT', 1)
  local entry = last[1] and last[1][1] or ''
  reply[#reply + 1] = table.concat({
    job[1] or '', job[2] or '', job[3] or '', job[4] or '', entry,
  }, ' ')
end
return reply
