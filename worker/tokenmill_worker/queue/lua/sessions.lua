-- Part of claim: leaves a job to the worker that had its session before, whose prefix cache has its
-- beginning.
--
-- A claim passes over such a job, and holds it for that worker, which takes it with its next claim.
-- After HELD_MS, any worker takes it; a worker that owns nothing and finds nothing else takes one
-- at once. A job is held at most once. Until it is delivered, it stays queued, its entry stays
-- pending in its stream, and its tenant is not charged. The field `held` has the worker's name.
--
--   held:<class>       all held jobs, by the time since when
--   held_for:<worker>  the same jobs by worker, MOST_HELD at most; only a shortcut, with a TTL
local HELD_MS, MOST_HELD, MOST_PASSED, HELD_TTL_S = 500, 32, 32, 60
local owned_before = redis.call('EXISTS', owned) == 1
local num_passed, rooms = 0, {}  -- per other worker: how many more jobs may be held for it
local awaits_others = false  -- jobs are held that this claim leaves to other workers

local function held_key(class) return base .. 'held:' .. class end
local function is_idle() return not owned_before and num_started == 0 end

local function room_of(holder)
  if not rooms[holder] then
    local count = redis.call('EXISTS', base .. 'worker:' .. holder) == 1
      and redis.pcall('ZCARD', base .. 'held_for:' .. holder)
    rooms[holder] = type(count) == 'number' and MOST_HELD - count or 0
    if rooms[holder] > 0 and wake_worker('ready', holder, now) == 0 then
      wake_worker('ready:urgent', holder, now)
    end
  end
  return rooms[holder]
end

-- Holds a job for the worker that has its session. Returns false if this claim is to take it.
local function pass_over(id, job)
  if not job.session or job.held or num_passed >= MOST_PASSED then return false end
  if outcome_of(job) ~= 'run' then return false end
  local holder = holder_of(job.session)
  if not holder or holder == worker or room_of(holder) <= 0 then return false end
  local added = redis.pcall('ZADD', held_key(job.class), whole(now), id)
  if type(added) == 'table' then return false end  -- another program wrote the key
  redis.call('HSET', job_key(id), 'held', holder)
  redis.call('ZADD', base .. 'held_for:' .. holder, whole(now), id)
  redis.call('EXPIRE', base .. 'held_for:' .. holder, HELD_TTL_S)
  rooms[holder] = rooms[holder] - 1
  num_passed = num_passed + 1
  awaits_others = true
  return true
end

local function by_entry(one, other)
  local ms, place = string.match(one.entry, '^(%d+)-(%d+)$')
  local other_ms, other_place = string.match(other.entry, '^(%d+)-(%d+)$')
  if ms ~= other_ms then return number(ms, 0) < number(other_ms, 0) end
  return number(place, 0) < number(other_place, 0)
end

-- Puts a held job into `found`, at its tenant, or removes it from the list if it is held no more.
local function add_held(found, seen, list, id, is_late)
  if seen[id] then return end
  seen[id] = true
  local job = is_id(id) and redis.pcall('HMGET', job_key(id), 'state', 'held', 'class', 'tenant',
    'entry') or {}
  if job.err or job[1] ~= 'queued' or not job[2] or not job[5] then
    note_gone(id)
    redis.call('ZREM', list, id)
    return
  end
  local tenants = found[class_of(job[3])]
  local tenant = job[4] or ''
  tenants[tenant] = tenants[tenant] or {}
  table.insert(tenants[tenant], {id = id, entry = job[5], is_late = is_late})
end

-- Finds the held jobs that this claim may take: those held for this worker, and those held long
-- enough; with `takes_any`, all. Per class it looks at the MOST_HELD oldest. Returns them by class
-- and tenant, in the order of their streams, and the number of held jobs by class.
local function find_held(takes_any)
  local found, counts, seen = {}, {}, {}
  local keys = {}
  for _, class in ipairs(CLASSES) do
    found[class], counts[class], keys[#keys + 1] = {}, 0, held_key(class)
  end
  if redis.call('EXISTS', unpack(keys)) == 0 then return found, counts end
  local mine = redis.pcall('ZRANGE', base .. 'held_for:' .. worker, 0, -1)
  for _, id in ipairs(mine.err and {} or mine) do
    add_held(found, seen, base .. 'held_for:' .. worker, id)
  end
  for _, class in ipairs(CLASSES) do
    local oldest = redis.pcall('ZRANGE', held_key(class), 0, MOST_HELD - 1, 'WITHSCORES')
    if oldest.err then oldest = {} end
    counts[class] = #oldest / 2
    for place = 1, #oldest, 2 do
      local since = number(oldest[place + 1], 0)
      local is_late = now - since >= HELD_MS or since > now  -- the server's clock may have jumped
      if takes_any or is_late then
        add_held(found, seen, held_key(class), oldest[place], is_late)
      elseif not seen[oldest[place]] then
        awaits_others = true
      end
    end
    for _, jobs in pairs(found[class]) do table.sort(jobs, by_entry) end
  end
  return found, counts
end

-- Moves late jobs that could not be taken, for example because of their tenant's limit, behind the
-- other late ones, so that the next claims look at those.
local function rotate_held(found, counts)
  for class, tenants in pairs(found) do
    for _, jobs in pairs(counts[class] >= MOST_HELD and tenants or {}) do
      for _, job in ipairs(jobs) do
        if job.is_late then
          redis.call('ZADD', held_key(class), 'XX', whole(now - HELD_MS), job.id)
        end
      end
    end
  end
end
