// A holder that uses nothing but the wire: acquire, renew, serve a forward,
// release. Prints one JSON line a step; exits 1 at the first surprise.
import { connect, headers } from "@nats-io/transport-node";

const nc = await connect({ servers: process.argv[2], timeout: 5000 });
const say = (step, value) => console.log(JSON.stringify({ step, ...value }));
const fail = (why) => { console.error(why); process.exit(1); };

// Revisions are above 2^53 one day, or may be: they are kept as text, never as
// a number.
const revisionOf = (text) => /"revision":\s*([0-9]+)/.exec(text)?.[1];
async function call(name, body) {
  const msg = await nc.request(`api.leases.${name}`, body, { timeout: 5000 });
  const text = msg.string();
  return { ...JSON.parse(text), revision: revisionOf(text), code: msg.headers?.get("Nats-Service-Error-Code") };
}

const key = "js-key", holder = "js-holder";
const got = await call("acquire", JSON.stringify({ key, holder, ttl_ms: 5000 }));
if (!got.granted) fail(`acquire: ${JSON.stringify(got)}`);
say("acquired", { revision: got.revision });

const sub = nc.subscribe(`dagnats.lease.inbox.${holder}.>`);
(async () => {
  for await (const m of sub) {
    const fence = m.headers?.get("Dagnats-Lease-Fence");
    if (!/^[0-9]+$/.test(fence ?? "") || BigInt(fence) < BigInt(got.revision)) {
      const h = headers();
      h.set("Dagnats-Lease-Reject", "stale");
      m.respond("", { headers: h });
      continue;
    }
    m.respond(new TextEncoder().encode(`${m.string()} at ${fence}`));
  }
})();
await nc.flush();

const renewed = await call("renew", `{"key":"${key}","holder":"${holder}","ttl_ms":5000,"revision":${got.revision}}`);
if (!renewed.granted || BigInt(renewed.revision) <= BigInt(got.revision)) fail(`renew: ${JSON.stringify(renewed)}`);
say("renewed", { revision: renewed.revision });

const reply = await call("forward", JSON.stringify({ key, payload: Buffer.from("hello").toString("base64") }));
if (Buffer.from(reply.payload ?? "", "base64").toString() !== `hello at ${renewed.revision}`) fail(`forward: ${JSON.stringify(reply)}`);
say("forwarded", { holder: reply.holder });

const lost = await call("release", `{"key":"${key}","holder":"${holder}","revision":${got.revision}}`);
if (lost.kind !== "lost" || lost.code !== "409") fail(`a release with the old revision: ${JSON.stringify(lost)}`);
const released = await call("release", `{"key":"${key}","holder":"${holder}","revision":${renewed.revision}}`);
if (!released.released) fail(`release: ${JSON.stringify(released)}`);
say("released", { revision: released.revision });
await nc.drain();
