-- The role `gateway` of `tokenmill gateway`, with its rights and no others. Run as the owner of the tables, after each
-- `tokenmill db upgrade`; it may be repeated:
--   psql "$URL" --single-transaction --set ON_ERROR_STOP=1 --file ops/deploy/postgres/gateway.sql
-- Then, once: ALTER ROLE gateway PASSWORD '…'
-- The role reads answers, usage, keys and batches. It keeps files, makes and cancels batches, and empties an answer that
-- its owner deletes. It makes no key, writes no answer and no usage, and removes no row but a file's.
DO $$
BEGIN
  CREATE ROLE gateway LOGIN;
EXCEPTION
  WHEN duplicate_object OR unique_violation THEN NULL; -- it is there
END
$$;

REVOKE ALL ON ALL TABLES IN SCHEMA public FROM gateway;
GRANT SELECT ON jobs, usage, usage_daily, usage_days, batches, batch_items, files, api_keys, tenant_webhooks TO gateway;
GRANT UPDATE (text, reasoning, token_ids, logprobs, prompt, params, metadata, envelope, result) ON jobs TO gateway;
GRANT INSERT, UPDATE (state, cancelling_ms) ON batches TO gateway;
GRANT INSERT, UPDATE, DELETE ON files TO gateway;

-- A grant cannot tell emptying from writing; this does.
CREATE OR REPLACE FUNCTION gateway_empties_answers() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF num_nonnulls(NEW.text, NEW.reasoning, NEW.token_ids, NEW.logprobs, NEW.prompt, NEW.params, NEW.metadata,
                  NEW.envelope, NEW.result) > 0 THEN
    RAISE EXCEPTION 'the role gateway may empty an answer, and not write one' USING ERRCODE = 'insufficient_privilege';
  END IF;
  RETURN NEW;
END
$$;
CREATE OR REPLACE TRIGGER gateway_empties_answers BEFORE UPDATE ON jobs
  FOR EACH ROW WHEN (current_user = 'gateway') EXECUTE FUNCTION gateway_empties_answers();
