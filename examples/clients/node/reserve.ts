// Reserves a GPU, renews the lease, and gives the GPU back.
//
//   npm install && buf generate ../../../protos && npx tsc && node out/reserve.js localhost:7070
//
// A token is read from the file that GPUSCALE_TOKEN_FILE names, the authority's certificate from GPUSCALE_CA_FILE.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { BinaryReader } from "@bufbuild/protobuf/wire";
import { credentials, Metadata, type ServiceError } from "@grpc/grpc-js";
import { AllocatorServiceClient, ReserveRequest } from "./gen/gpuscale/api/allocator/v1/allocator_service.js";

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

/** The reason of an error: google.rpc.ErrorInfo in the google.rpc.Status that comes with it. */
function reason(error: ServiceError): string {
  const [status] = error.metadata.get("grpc-status-details-bin") as Buffer[];
  for (const any of status ? fields(status, 3) : []) {
    const [type] = fields(any, 1);
    if (Buffer.from(type).toString().endsWith("/google.rpc.ErrorInfo")) {
      return Buffer.from(fields(fields(any, 2)[0], 1)[0]).toString();
    }
  }
  return "";
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
const renewed = await call(client.renewReservation, { name, fence, ttl: undefined });
console.log("renewed", renewed.reservation?.remaining?.seconds);
await call(client.releaseReservation, { name, fence });
console.log("released", name);
try {
  await call(client.renewReservation, { name, fence, ttl: undefined });
} catch (error) {
  console.log("refused", (error as ServiceError).code, reason(error as ServiceError));
}
client.close();
