// What page.js and timeline.js use of the libraries, as `libraries.NAME`.
export { select, selectAll, pointer } from "d3-selection";
export { scaleLinear, scaleLog } from "d3-scale";
export { axisBottom, axisLeft } from "d3-axis";
export { zoom, zoomIdentity } from "d3-zoom";
export { line, curveBasis } from "d3-shape";
export { bisector, extent, max } from "d3-array";
export { layout, Graph } from "@dagrejs/dagre";
