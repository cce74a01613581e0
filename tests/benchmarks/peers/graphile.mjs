// Graphile Worker with its local queue of 500 and 24 jobs at once.
// Speaks as tests/benchmarks/actor.py does: `node graphile.mjs VERB JSON`.

import { createRequire } from "node:module";
import { openSync, writeSync } from "node:fs";
import { createInterface } from "node:readline";

const require = createRequire(`${process.env.NODE_PATH}/`);
const { run, runMigrations } = require("graphile-worker");
const { Client } = require("pg");

const [verb, json] = process.argv.slice(2);
const given = JSON.parse(json);
const connectionString = process.env.MYXO_PEER_DATABASE;
const monotonic = () => Number(process.hrtime.bigint()) / 1e9;

const words = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const ready = async () => {
  console.log("ready");
  await words.next();
};

const client = new Client({ connectionString });
const putOne = (number) =>
  client.query({
    name: "put",
    text: "SELECT graphile_worker.add_job('noop', json_build_object('number', $1::bigint))",
    values: [number],
  });
const putAll = (count) =>
  client.query(
    `SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(
       SELECT json_populate_record(NULL::graphile_worker.job_spec, json_build_object(
         'identifier', 'noop', 'payload', json_build_object('number', n)))
       FROM generate_series(0, $1::bigint - 1) AS series(n)))`,
    [count],
  );

const verbs = {
  async install() {
    await runMigrations({ connectionString });
  },
  async fill({ count }) {
    await putAll(count);
  },
  async put({ seconds }) {
    await putOne(1_000_000);
    await ready();
    const began = monotonic();
    let now = began;
    let count = 0;
    for (; now - began < seconds; count++) {
      await putOne(1_000_001 + count);
      now = monotonic();
    }
    return { count, seconds: now - began };
  },
  async put_many({ count, times }) {
    await putOne(1_000_000);
    await ready();
    const began = monotonic();
    for (let time = 0; time < times; time++) await putAll(count);
    return { count: count * times, seconds: monotonic() - began };
  },
  async put_at_a_pace({ first, pauses }) {
    await putOne(-1);
    await ready();
    const moments = [];
    let planned = monotonic();
    for (const [place, pause] of pauses.entries()) {
      planned += pause;
      const wait = planned - monotonic();
      if (wait > 0) await new Promise((done) => setTimeout(done, wait * 1000));
      moments.push([first + place, monotonic()]);
      await putOne(first + place);
    }
    return moments;
  },
};

async function work() {
  const file = openSync(process.env.MYXO_BENCHMARK_RAN, "a");
  const record = Buffer.alloc(16);
  const runner = await run({
    preset: {
      worker: {
        connectionString,
        concurrentJobs: 24,
        maxPoolSize: 26,
        localQueue: { size: 500 },
        completeJobBatchDelay: 250,
        failJobBatchDelay: 250,
      },
    },
    taskList: {
      noop({ number }) {
        record.writeBigInt64LE(BigInt(number), 0);
        record.writeDoubleLE(monotonic(), 8);
        writeSync(file, record);
      },
    },
  });
  await runner.promise;
}

if (verb === "work") {
  await work();
} else {
  await client.connect();
  if (verb === "install" || verb === "fill") await ready();
  const result = await verbs[verb](given);
  console.log(JSON.stringify(result ?? null));
  await client.end();
  process.exit(0);
}
