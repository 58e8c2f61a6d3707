// Reserves a GPU, renews the lease, and gives the GPU back.
//
//   npm install && buf generate ../../../protos/gpuscale/api/contract.binpb --path gpuscale/api/allocator && npx tsc && node out/reserve.js localhost:7070
//
// A token is read from the file that GPUSCALE_TOKEN_FILE names, the authority's certificate from GPUSCALE_CA_FILE.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { BinaryReader } from "@bufbuild/protobuf/wire";
import { credentials, Metadata, type ServiceError } from "@grpc/grpc-js";
import {
  AllocatorServiceClient,
  RenewReservationRequest,
  ReserveRequest,
  WatchReservationsRequest,
} from "./gen/gpuscale/api/allocator/v1/allocator_service.js";

const { GPUSCALE_TOKEN_FILE: tokenFile, GPUSCALE_CA_FILE: caFile } = process.env;
const channel = caFile ? credentials.createSsl(readFileSync(caFile)) : credentials.createInsecure();
const client = new AllocatorServiceClient(process.argv[2] ?? "localhost:7070", channel);
const headers = new Metadata();
if (tokenFile) headers.set("authorization", `Bearer ${readFileSync(tokenFile, "utf8").trim()}`);

type Method<Q, A> = (
  request: Q,
  metadata: Metadata,
  options: { deadline: number },
  callback: (error: ServiceError | null, answer: A) => void,
) => unknown;

/** Calls a method with a deadline of ten seconds. */
function call<Q, A>(method: Method<Q, A>, request: Q): Promise<A> {
  return new Promise((resolve, reject) =>
    method.call(client, request, headers, { deadline: Date.now() + 10_000 }, (error, answer) =>
      error ? reject(error) : resolve(answer),
    ),
  );
}

/** The detail of an error of that type, such as ErrorInfo, out of the google.rpc.Status that comes with it. */
function detail(error: unknown, type: string): Uint8Array {
  const [status] = (error as ServiceError).metadata.get("grpc-status-details-bin") as Buffer[];
  const found = fields(status, 3).find((any) => text(any, 1).endsWith(`/google.rpc.${type}`));
  if (!found) throw error;
  return fields(found, 2)[0];
}

/** The first text of that number in an encoded message. */
function text(message: Uint8Array, number: number): string {
  return Buffer.from(fields(message, number)[0]).toString();
}

/** The length-delimited fields of that number in an encoded message. */
function fields(message: Uint8Array, number: number): Uint8Array[] {
  const found: Uint8Array[] = [];
  for (const reader = new BinaryReader(message); reader.pos < reader.len; ) {
    const [field, wire] = reader.tag();
    if (field === number && wire === 2) found.push(reader.bytes());
    else reader.skip(wire);
  }
  return found;
}

const wish = ReserveRequest.fromPartial({ requestId: randomUUID(), holder: "node", ask: { gpuCount: 1 } });
const { reservation } = await call(client.reserve, wish);
if (!reservation) throw new Error("an answer without a reservation");
console.log("reserved", reservation.name, reservation.gpus[0].uuid);
const again = await call(client.reserve, wish); // as after an answer that was lost: the same request_id, the same grant
console.log("repeated", again.reservation?.name);
const { name, fence } = reservation;
const renewed = await call(client.renewReservation, RenewReservationRequest.fromPartial({ name, fence }));
console.log("renewed", renewed.reservation?.remaining?.seconds);
const watch = client.watchReservations(WatchReservationsRequest.fromPartial({ holder: "node" }), headers);
watch.on("error", () => {}); // how it ends where it is cancelled
for await (const { reservations, full } of watch) {
  for (const one of reservations) if (one.name === name) console.log("watched", one.name);
  if (full) break; // each further message tells of a change
}
watch.cancel();
await call(client.releaseReservation, { name, fence });
console.log("released", name);
try {
  await call(client.renewReservation, RenewReservationRequest.fromPartial({ name, fence }));
} catch (error) {
  console.log("refused", (error as ServiceError).code, text(detail(error, "ErrorInfo"), 1));
}
try {
  await call(client.reserve, { ...wish, requestId: "no UUID" });
} catch (error) {
  const [violation] = fields(detail(error, "BadRequest"), 1);
  console.log("mistaken", (error as ServiceError).code, text(violation, 1));
}
client.close();
