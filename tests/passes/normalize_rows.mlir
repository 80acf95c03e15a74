// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// Rows that a mask selects: their number is counted by a leaf. A mean inside each sample stays with the sample, and a weight that inputs
// normalise over the batch goes to the coefficient.

sec.graph "masked" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "rows_0" kind "data" key "" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %mask = sec.input "mask" : !sec.tensor<[B], bool>
    %share = sec.input "share" : !sec.tensor<[B], f32>
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %some = sec.glue "aten.index.Tensor" (%y, %mask) args "$0, [$1]" : !sec.tensor<[rows_0, 8], f32, grad>
    %size = sec.glue "aten.logsumexp.default" (%some) args "$0, [-1]" : !sec.tensor<[rows_0], f32, grad>
    %first = sec.glue "aten.mean.default" (%size) args "$0" : !sec.tensor<[], f32, grad>

    %each = sec.glue "aten.mean.dim" (%y) args "$0, [1]" : !sec.tensor<[B], f32, grad>
    %all = sec.glue "aten.sum.default" (%share) args "$0" : !sec.tensor<[], f32>
    %weight = sec.glue "aten.div.Tensor" (%share, %all) args "$0, $1" : !sec.tensor<[B], f32>
    %weighted = sec.glue "aten.mul.Tensor" (%each, %weight) args "$0, $1" : !sec.tensor<[B], f32, grad>
    %second = sec.glue "aten.sum.default" (%weighted) args "$0" : !sec.tensor<[], f32, grad>

    %loss = sec.glue "aten.add.Tensor" (%first, %second) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)

    // CHECK: %each = sec.glue "aten.mean.dim"
    // CHECK: [[COUNT:%[0-9]+]] = sec.glue "aten.sum.default" (%mask)
    // CHECK: [[SUM:%[0-9]+]] = sec.glue "aten.sum.default" (%size)
    // CHECK: [[ROWS:%[0-9]+]] = sec.glue "aten.mul.Tensor" (%each, %share)
    // CHECK: [[TOTAL:%[0-9]+]] = sec.glue "aten.sum.default" ([[ROWS]])
    // CHECK: [[LEAF:%[0-9]+]] = sec.leaf "loss.count" ([[COUNT]])
    // CHECK: sec.term "loss" ([[SUM]], {{%[0-9]+}})
    // CHECK: [[LEAF:%[0-9]+]] = sec.leaf "loss_1.count" (%all)
    // CHECK: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[LEAF]])
    // CHECK: sec.term "loss_1" ([[TOTAL]], [[SHARE]])
  }
}
