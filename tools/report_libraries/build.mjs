// Bundles the libraries of report.html into one file without network access, below their licences.
//
//     cd tools/report_libraries && npm ci && npm run build
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";

const target = "../../secc/report/page/libraries.js";
const { outputFiles, metafile } = await build({
  entryPoints: ["entry.js"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "libraries",
  charset: "ascii",
  legalComments: "none",
  metafile: true,
  write: false,
});
const packages = Object.keys(metafile.inputs)
  .map((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1])
  .filter(Boolean);
const namesByLicence = new Map();
for (const name of [...new Set(packages)].sort()) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  const licence = readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
  namesByLicence.set(licence, [...(namesByLicence.get(licence) ?? []), `${name} ${version}`]);
}
const licences = [...namesByLicence].map(([licence, names]) => `${names.join(", ")}\n\n${licence}`);
const header = `/*! Libraries of the report, bundled by tools/report_libraries.\n\n${licences.join("\n\n---\n\n")}\n*/\n`;
if (/<\/?script|<!--/i.test(outputFiles[0].text)) throw new Error("the bundle cannot stand in a page");
writeFileSync(target, header + outputFiles[0].text);
console.log(`${target}: ${header.length + outputFiles[0].text.length} bytes`);
